"""Triton kernels: copies between an engine's buffers and canonical pages, and XXH3 leaves, on the GPU.

The only place that imports triton. Importing this package imports neither triton nor torch.
"""

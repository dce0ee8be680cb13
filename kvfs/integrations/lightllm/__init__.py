"""LightLLM: kvfs in place of LightMem, behind the disk worker of its multi-level cache.

``python -m kvfs.integrations.lightllm`` prints the directory of a package ``light_mem`` to put on PYTHONPATH; LightLLM
imports it. LightLLM itself is not imported. See docs/lightllm.md.
"""

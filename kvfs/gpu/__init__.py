"""Asynchronous saves and loads of an engine's buffers on a GPU."""

"""Asynchronous saves and loads of an engine's buffers in host memory."""

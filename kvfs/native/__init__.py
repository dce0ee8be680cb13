"""The compiled fast path, as Python sees it: hash chains, lookups in the index, payloads; absent or off, Python does it."""

"""The compiled fast path, as Python sees it: hash chains, lookups in the index, payloads. Python works without it."""

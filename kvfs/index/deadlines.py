"""How long a call waits for the index. After that a lookup is a miss, and a write is declined or tried later."""

LOOKUP_SECONDS = 0.25  # of lookups: after it the engine computes
COMMIT_SECONDS = 2.0  # of writers and upkeep

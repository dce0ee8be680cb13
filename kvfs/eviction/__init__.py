"""Which segment is evicted, and how its file is reclaimed."""

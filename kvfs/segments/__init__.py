"""One segment file: append, scan, hold open."""

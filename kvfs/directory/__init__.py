"""The small files of a store's directory: settings, liveness, counters, access times, purge marks, pins."""

"""Pages beyond this host: objects of a bucket that several stores share, what leaves for it and what comes from it."""

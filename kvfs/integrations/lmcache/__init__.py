"""LMCache: kvfs as an L2 adapter of its multiprocess server.

``adapter`` holds the class that LMCache loads by name. What it does is in the other modules, which do not import
LMCache. See docs/lmcache.md.
"""

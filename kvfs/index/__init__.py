"""LMDB: which record holds which page, and the ledger of allocated bytes."""

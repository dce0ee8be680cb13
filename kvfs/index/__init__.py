"""The index: LMDB behind a flock gate, touched by one thread, rebuilt from segments when it cannot be trusted."""

from kvfs.index.environment import Index
from kvfs.index.session import Session, Tables

__all__ = ["Index", "Session", "Tables"]

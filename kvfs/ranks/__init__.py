"""Prefixes that the GPUs of a host's ranks hold: published in shared memory, pulled from GPU to GPU.

With data parallelism the KV of a conversation is in one rank's GPU, and its next turn may come to another one. A rank
that joins a ``RankGroup`` publishes which pages its GPU holds, finds those of its peers, and copies them over the link
between the GPUs, verified as pages of the store are.
"""

from kvfs.ranks.group import RankGroup
from kvfs.ranks.plan import RankPlan, RankTables

__all__ = ["RankGroup", "RankPlan", "RankTables"]

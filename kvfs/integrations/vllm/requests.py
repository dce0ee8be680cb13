"""The scheduler's state of one request: its tokens as pages, which of them are stored, which are being stored."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.lookup.prompt_pages import TOKENS_MAX, PromptPages
from kvfs.lookup.search import prefix_length
from kvfs.namespace import Namespace
from kvfs.ranks import RankPlan
from kvfs.remote.bucket_process import Fetch
from kvfs.types import Tier

_CONTENT_HASH = re.compile(r"[0-9a-f]{64,128}")


class Waiting:
    """What a request waits for: its fetch, and since when."""

    def __init__(self, fetch: Fetch, chunks: int) -> None:
        self.fetch, self.chunks = fetch, chunks
        self.since: float | None = None  # when the engine would have computed it


class RequestPages:
    """Pages of one request. They grow while it decodes. Its ``extra_keys`` are part of the chain.

    Owns the match of its load, and thereby the hold on the segments; delegates lookups to ``PromptPages``.
    """

    def __init__(self, request: Any, namespace: Namespace, epoch: int, max_tokens: int, adapter: bytes = b"") -> None:
        self._request, self._max_tokens, self._adapter = request, max_tokens, adapter
        self.page_tokens = namespace.layout.page_tokens
        self.pages = self._pages(namespace, epoch)
        self.looked_at = float("-inf")
        self.prefix = False  # whether the last lookup ended at the first page that is not stored
        self.worth_tokens = TOKENS_MAX  # of its stored prefix; the rest is computed sooner than it is loaded
        self.counted = False
        self.failed = False  # a load failed: the request is computed, and not looked up again until it is preempted
        self.waiting: Waiting | None = None  # for the bucket
        self.peers: dict[str, int] = {}  # group -> set of chunks that GPUs of other ranks held at the last lookup
        self._leading: dict[str, int] = {}  # group -> tokens that it has from the first on, until a lookup changes it
        self.match: PrefixMatch | None = None  # held until its load ends
        self.plans: dict[int, RankPlan] = {}  # likewise, by worker, if a part comes from other ranks
        self.blocks: frozenset[int] = frozenset()  # that its load fills; not of hybrids
        #: of the pages of the match: sets of chunks, as bits, by group and tier
        self.tiers: dict[Tier, dict[str, int]] = {}
        self.storing: dict[str, int] = {}  # group -> set of chunks that are being stored, as bits

    def restart(self, namespace: Namespace, epoch: int) -> None:
        """Forget everything: the weights have changed."""
        self.release()
        self.pages = self._pages(namespace, epoch)
        self.forget()
        self.storing.clear()

    def _pages(self, namespace: Namespace, epoch: int) -> PromptPages:
        extra = extra_keys(self._request, self.page_tokens, epoch, self._adapter)
        return namespace.prompt(self._tokens(0), extra=extra)

    @property
    def attempt(self) -> bytes:
        """Save id, 8 bytes, equal on all ranks: parts that a dead rank left of an earlier save are replaced."""
        return hashlib.blake2b(self._request.request_id.encode(), digest_size=8).digest()

    def look(self, first: int, *, prefix: bool = False) -> None:
        """Look up the chunks from ``first`` on in the store; ``prefix``: those before the first that is missing."""
        self.pages.look(first, prefix=prefix)
        self.prefix = prefix
        self._leading.clear()

    def use_peers(self, peers: dict[str, int]) -> None:
        """Chunks that GPUs of other ranks hold, by group, from now on."""
        self.peers = peers
        self._leading.clear()

    def forget(self) -> None:
        """Treat nothing as stored until the next lookup."""
        self.pages.forget()
        self.use_peers({})

    def grow(self) -> None:
        """Add the tokens that were generated since, once they fill a page."""
        if min(self._request.num_tokens, self._max_tokens) // self.page_tokens > self.pages.chunks:
            self.pages.extend(self._tokens(self.pages.tokens))

    @property
    def loads(self) -> bool:
        """Whether a load of it has not ended."""
        return self.match is not None or bool(self.plans)

    def has(self, group: str) -> int:
        """The chunks of a group, as bits, that the store or another rank holds."""
        return self.pages.stored[group] | self.peers.get(group, 0)

    def leading_tokens(self, group: str) -> int:
        """Up to where ``has`` has no gap. One number for all keys of a request: vLLM asks key by key."""
        tokens = self._leading.get(group)
        if tokens is None:
            tokens = self._leading[group] = prefix_length(self.has(group)) * self.page_tokens
        return tokens

    def release(self) -> None:
        """Release the segments of its match."""
        self.blocks = frozenset()
        for plan in self.plans.values():
            plan.close()
        self.plans = {}
        if self.match is not None:
            self.match.close()
            self.match = None

    def _tokens(self, first: int) -> list[int]:
        end = min(self._request.num_tokens, self._max_tokens)
        tokens: list[int] = self._request.all_token_ids[first:end]  # a copy already
        return tokens


def cacheable(request: Any, *, items_hashed: bool, adapter: bytes | None) -> bool:
    """Whether the KV of a request depends only on what is part of its chain.

    ``items_hashed``: whether this engine identifies images and other items by their content. A name that a client
    chose does not identify it. ``adapter``: the digest of its adapter; None if that is unknown.
    """
    return (
        (items_hashed or not request.mm_features)
        and all(_CONTENT_HASH.fullmatch(feature.identifier) for feature in request.mm_features)
        and (request.lora_request is None or adapter is not None)
        and request.prompt_embeds is None
        and request.prompt_token_ids is not None
        and not request.resumable  # its tokens may be replaced by later input
    )


def extra_keys(request: Any, page_tokens: int, epoch: int, adapter: bytes = b"") -> dict[int, bytes]:
    """Chunk number -> what its KV depends on in addition to the tokens: tenant, weight epoch, adapter, images and
    other items.

    By the chain, each key applies to all later chunks. An item's key is in every chunk that the item touches, since
    attention inside an item may be bidirectional.
    """
    extra: dict[int, bytes] = {}
    if request.cache_salt or epoch:
        extra[0] = hashlib.blake2b(f"vllm {epoch} {request.cache_salt or ''}".encode(), digest_size=16).digest()
    if adapter:
        extra[0] = hashlib.blake2b(b"adapter" + adapter + extra.get(0, b""), digest_size=16).digest()
    for feature in request.mm_features:
        first, count = feature.mm_position.offset, feature.mm_position.length
        for chunk in range(first // page_tokens, -(-(first + count) // page_tokens)):
            key = f"{feature.modality} {feature.identifier} {first - chunk * page_tokens}".encode()
            extra[chunk] = hashlib.blake2b(extra.get(chunk, b"") + key, digest_size=16).digest()
    return extra

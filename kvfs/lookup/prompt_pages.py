"""PromptPages: one prompt, page by page, for engines that decide themselves what to load and what to save.

``Namespace.match`` and ``plan_save`` decide for their caller. A paged engine asks about each of its blocks, combines
the answer with what it already has, and wants exactly some of the pages::

    pages = ns.prompt(token_ids)
    pages.look()                                          # one walk over the index
    pages.stored["full"] >> 3 & 1                         # is page 3 stored?
    io.load(pages.select({"full": 2}, end=7), units)      # pages 2 to 6
    io.save(pages.plan({"full": [7, 8]}), units)

Its pages are named by token ids; by the chunk hashes of an engine that computes the same chain (``hashes=``); or by
keys of the engine (``keys=``), which have no order, so that each page is a unit of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvfs.context import Context
from kvfs.errors import ConfigError
from kvfs.lookup.matcher import Matcher
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.lookup.search import GroupLookup, Prompt, valid_lengths
from kvfs.pages import chunk_hash
from kvfs.pages.chunk_hash_cache import Chain
from kvfs.pages.identity import Identity
from kvfs.pages.layout import PageLayout
from kvfs.types import ExtraKeys, SavePlan, TokensLike

TOKENS_MAX = 1 << 24  # of one prompt: bounds what a lookup hashes, 64 MiB


def checked_tokens(layout: PageLayout, token_ids: TokensLike, known: int = 0) -> bytes:
    """Token ids as bytes for the chain, after ``known`` others. ConfigError for what is not token ids, or too many."""
    if layout.kind == "opaque":
        raise ConfigError("this namespace holds opaque pages: use match_keys and put_keys")
    tokens = chunk_hash.token_bytes(token_ids)
    count = known + len(tokens) // chunk_hash.TOKEN_BYTES
    if count > TOKENS_MAX:
        raise ConfigError(f"{count} token ids: at most {TOKENS_MAX} in one prompt")
    return tokens


def checked_extra(extra: ExtraKeys | None) -> ExtraKeys | None:
    """``extra``, unchanged. ConfigError unless it is None or a mapping from chunk numbers to bytes."""
    if extra is not None and not isinstance(extra, Mapping):
        raise ConfigError(f"extra is {type(extra).__name__}: pass a mapping from chunk number to bytes")
    for chunk, key in (extra or {}).items():
        if type(chunk) is not int or chunk < 0 or not isinstance(key, bytes):
            raise ConfigError(f"extra maps {chunk!r} to {type(key).__name__}: map chunk numbers to bytes")
    return extra


def chain_of(
    context: Context, identity: Identity, token_ids: TokensLike, leave: int = 0, extra: ExtraKeys | None = None
) -> Chain:
    """The chunks of a prompt without its last ``leave`` tokens. ConfigError for what is not a prompt."""
    tokens = checked_tokens(identity.layout, token_ids)
    if type(leave) is not int or leave < 0:
        raise ConfigError(f"leave is {leave!r}: pass the number of tokens to compute, 0 or more")
    usable = tokens[: max(0, len(tokens) - leave * chunk_hash.TOKEN_BYTES)]
    return Chain(context.chains, usable, identity.layout.page_tokens, identity.seed, checked_extra(extra))


def prompt_of_hashes(identity: Identity, hashes: Sequence[bytes]) -> Prompt:
    """A prompt of given chunk hashes, the first of which is that of its first chunk."""
    if identity.layout.kind == "opaque":
        raise ConfigError("this namespace holds opaque pages, which no chunk hash names: pass keys=")
    _check_names("hashes", hashes)
    of_one_block = isinstance(hashes, chunk_hash.ChunkHashes)
    wrong = None if of_one_block else next((h for h in hashes if len(h) != chunk_hash.HASH_BYTES), None)
    if wrong is not None:
        raise ConfigError(f"hashes holds {len(wrong)} bytes: pass chunk hashes of {chunk_hash.HASH_BYTES} bytes each")
    if len(hashes) * identity.layout.page_tokens > TOKENS_MAX:
        raise ConfigError(f"{len(hashes)} hashes: at most those of {TOKENS_MAX} tokens in one prompt")
    return Prompt(identity.digest, chunk_hash.ChunkHashes(chunk_hash.joined(hashes)))


def prompt_of_keys(identity: Identity, keys: Sequence[bytes]) -> Prompt:
    """The pages of an engine's keys, which have no order, as a prompt with runs of one chunk."""
    _check_names("keys", keys)
    return Prompt(identity.digest, chunk_hash.chunks_of_keys(keys, identity.seed), run_length=1)


def _check_names(what: str, names: Sequence[bytes]) -> None:
    if isinstance(names, chunk_hash.ChunkHashes):
        return  # a block of them
    if (
        isinstance(names, (bytes, str))
        or not all(issubclass(kind, bytes) for kind in set(map(type, names)))
        or not all(names)
    ):
        raise ConfigError(f"{what} must be a sequence of non-empty bytes objects, one per page")


class PromptPages:
    """The pages of a prompt, or of keys. Made by ``Namespace.prompt``; not thread-safe.

    Owns the chunk hashes and what the last ``look`` found; lookups and matches are delegated to ``Matcher``.
    """

    def __init__(
        self, context: Context, matcher: Matcher, identity: Identity, extra: ExtraKeys | None, named: Prompt | None
    ) -> None:
        """``named``: pages whose names are given; None: of tokens, which ``extend`` adds."""
        self._c, self._matcher, self._identity = context, matcher, identity
        self._extra = dict(checked_extra(extra) or {})
        self._of_tokens = named is None
        self._prompt = named or Prompt(identity.digest, chunk_hash.ChunkHashes())
        self.chunks = len(self._prompt.hashes)  # whole ones
        self._tail = b""  # tokens after the last full chunk
        #: group name -> set of chunks as bits: whole pages that were stored, or being written, at the last ``look``
        self.stored: dict[str, int] = {}
        self.writing: dict[str, int] = {}
        self._selected_us = 0  # when ``select`` was called last
        self._found: list[GroupLookup] = []  # of the last ``look`` that began where the one before began, or earlier
        self._first = 0  # where it began
        self._prefix = False  # whether the last ``look`` was for a prefix
        self.forget()

    @property
    def tokens(self) -> int:
        """How many tokens were given, including those after the last full chunk."""
        return self.chunks * self._identity.layout.page_tokens + len(self._tail) // chunk_hash.TOKEN_BYTES

    @property
    def hashes(self) -> Sequence[bytes]:
        """Chunk hashes: each names the whole prefix up to its end."""
        return self._prompt.hashes

    def joined_hashes(self, chunks: int) -> bytes:
        """The chunk hashes of the first ``chunks`` chunks, one behind the other."""
        return chunk_hash.joined(self._prompt.hashes[:chunks])

    def extend(self, token_ids: TokensLike) -> None:
        """Append tokens. What the last ``look`` found stays. ConfigError for a prompt of hashes or keys."""
        if not self._of_tokens:
            raise ConfigError("this prompt was made of hashes or keys: make a new one, tokens cannot continue it")
        data = self._tail + checked_tokens(self._identity.layout, token_ids, self.tokens)
        size, known = self._identity.layout.page_tokens, self.chunks
        extra = {c - known: key for c, key in self._extra.items() if c >= known}
        hashes = chunk_hash.ChunkHashes(self._prompt.joined)
        more = chunk_hash.chain(data, size, hashes[-1] if hashes else self._identity.seed, extra)
        self._prompt = replace(self._prompt, hashes=hashes + more)
        self.chunks = known + len(more)
        self._tail = data[len(more) * size * chunk_hash.TOKEN_BYTES :]

    def forget(self) -> None:
        """Treat nothing as stored until the next ``look``."""
        self.stored = {g.name: 0 for g in self._identity.layout.groups}
        self.writing = dict(self.stored)
        self._found = []

    def look(self, first: int = 0, *, prefix: bool = False) -> None:
        """Ask the index what is stored of the chunks from ``first`` on; what is known of earlier chunks stays.

        ``prefix``: of the chunks from 0 on, for a caller that can use none behind one that is missing: these may count
        as not stored. If the index cannot answer in time, none of the chunks counts as stored.
        """
        if prefix and first:
            raise ConfigError(f"first is {first}: a prefix begins with chunk 0")
        below = (1 << first) - 1
        lookups = [
            self._matcher.present(
                self._prompt, number, group, self._matcher.whole[number], first, self.chunks, whole=True, prefix=prefix
            )
            for number, group in enumerate(self._identity.layout.groups)
        ]
        if first <= self._first or not self._found:
            self._found, self._first = lookups, first
        elif self._prefix:  # what is behind its gap has not been found yet
            self._found = [*self._found, *lookups]
        self._prefix = prefix
        for lookup in lookups:
            group, found = lookup.group, lookup.found
            self.stored[group.name] = self.stored[group.name] & below | found.present & ~below
            self.writing[group.name] = self.writing[group.name] & below | found.claimed & ~found.present & ~below

    def restorable(self) -> int:
        """The longest length, in chunks, of which the last ``look`` found all pages that it needs."""
        valid = (1 << self.chunks + 1) - 1
        for group in self._identity.layout.groups:
            need = group.need.chunks(self._identity.layout.page_tokens)
            valid &= valid_lengths(self.stored[group.name], need, self.chunks)
        return valid.bit_length() - 1

    def needed(self, first: int, end: int) -> dict[str, int]:
        """For ``select``: from which page on each group is loaded by a reader that has the chunks before ``first``."""
        size = self._identity.layout.page_tokens
        needs = {group.name: group.need.chunks(size) for group in self._identity.layout.groups}
        return {name: first if need is None else max(first, end - need) for name, need in needs.items()}

    def select(self, first: Mapping[str, int], end: int, *, known: bool = False) -> PrefixMatch:
        """A match of the chunks before ``end``: of group g the pages from ``first[g]`` on, none if g is not named.

        It holds its segments like every match. Pages that are not stored make its load fail. The engine has the
        earlier pages: pass -1 for their units when it is loaded, or ``first_unit``. ``match.group(g).present`` says
        which pages the index names. Of keys each page is loaded by itself, also behind one that fails.
        ``known``: the last ``look`` was for them, so the index is asked again only if there was a commit since, or
        if the native library is not there to tell.
        """
        self._check(first, {name: [chunk] for name, chunk in first.items()}, end)
        whole = not self._first and len(self._found) == len(self.stored)  # one lookup of each group, from chunk 0 on
        found = self._found if known and whole and not any(first.values()) else None
        prompt = self._prompt
        if end < self.chunks:
            prompt = replace(prompt, hashes=prompt.hashes[:end])
        match = self._matcher.select(prompt, first, found)
        self._selected_us = match.at_us
        return match

    def plan(self, wanted: Mapping[str, Sequence[int]]) -> SavePlan:
        """A plan to save the chunks ``wanted`` (by group name), whether or not they are stored.

        What is stored by then is skipped. Of keys each page is saved by itself, also behind one that is declined.
        """
        try:
            self._check(wanted, wanted, self.chunks - 1)
            missing = {name: tuple(sorted(set(chunks))) for name, chunks in wanted.items()}
        except TypeError:
            raise ConfigError(f"wanted is {wanted!r}: map names of groups to lists of chunk numbers") from None
        return SavePlan(self.chunks, tuple(self.hashes), missing, self._identity.digest, self._prompt.keyed)

    def note_lookup(self, matched_tokens: int, loads: PrefixMatch | None = None) -> None:
        """Count this prompt as one lookup; ``matched_tokens``: how many of its tokens the engine loads.

        What ``look`` found counts as used, also where the engine has the pages and loads none. ``loads``: the match
        that it loads; the load itself notes the use of these pages.
        """
        at_us = self._selected_us or self._c.files.now_us()
        for lookup in self._found:
            noted = loads.group(lookup.group.name).present if loads is not None else 0
            self._matcher.note_use(lookup, at_us, noted)
        self._matcher.count_tokens(self.chunks * self._identity.layout.page_tokens, matched_tokens)

    def _check(self, names: Mapping[str, object], chunks: Mapping[str, Sequence[int]], last: int) -> None:
        for name in names:
            self._identity.layout.group(name)
            wrong = [c for c in chunks[name] if not 0 <= c <= last]
            if wrong or last > self.chunks:
                raise ConfigError(
                    f"chunk {wrong[0] if wrong else last} of group {name}: the prompt has {self.chunks} full chunks"
                )

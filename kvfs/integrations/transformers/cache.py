"""PrefixCache: loads a cache from a store before ``model.generate``, and saves it afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import pad as pad_with_zeros
from transformers import DynamicCache

from kvfs.errors import ConfigError, StoreReadOnlyError
from kvfs.integrations.transformers.layers import RecordingLayer, fits
from kvfs.integrations.transformers.model import ModelSource, cell_dims, shared_source_of, source_of
from kvfs.integrations.transformers.prompts import PromptRow, rows_of
from kvfs.integrations.transformers.tensors import pages_of, states_of
from kvfs.pages.chunk_set import members
from kvfs.pages.layout import Group
from kvfs.types import PutResult, Tier

if TYPE_CHECKING:
    from kvfs.lookup.prefix_match import PrefixMatch
    from kvfs.namespace import Namespace, SavePlan
    from kvfs.store import Store

SAVE_BYTES = 64 << 20  # gathered and written at a time: bounds the memory of a save
ATTEMPTS = 3  # loads of one prompt, each of a shorter prefix, if pages fail verification


def namespace_for(
    store: Store, model: Any, *, page_tokens: int = 64, revision: str | None = None, salt: str = "",
    adapter: str = "", epoch: int = 0, name: str | None = None, share: str = "",
) -> PrefixCache:  # fmt: skip
    """The part of ``store`` that holds KV of exactly this model.

    ``revision``: a commit or digest of the weights, which the caller guarantees. Default:
    ``weights_digest(model)``, which reads all weights once, and a digest of the config. ``adapter``: a digest
    of the content of the active PEFT adapters. ``epoch``: a count of in-place changes of the weights.
    ``salt``: a tenant's secret. ``name``: default the model type. ``share``: "engines" for the namespace that
    other engines of this model use (``kvfs.shared_identity``); it needs ``revision`` and takes no ``name``.

    UnsupportedModelError: a model whose KV must not be reused, or whose cache is unsupported (quantised,
    multimodal, linear attention, KV sharing, encoder-decoder, offloaded, adapters without a digest, RoPE
    that depends on the length). ConfigError: a bad argument, or a model in training mode.
    """
    if share:
        if share != "engines" or name is not None:
            raise ConfigError(f'share is {share!r}, name {name!r}: pass share="engines" without a name, or no share')
        source = shared_source_of(model, page_tokens, revision, adapter)
        assert source.shared is not None
        return PrefixCache(store.namespace(**source.shared, salt=salt, epoch=epoch), source)
    source = source_of(model, page_tokens, revision, adapter)
    namespace = store.namespace(
        name or model.config.model_type, source.layout, revision=source.revision, salt=salt, rope=source.rope,
        adapter=adapter, epoch=epoch, extra=source.extra,
    )  # fmt: skip
    return PrefixCache(namespace, source)


class _Loaded(NamedTuple):
    """Pages of one row in host memory."""

    tokens: int  # verified, from the start of the row
    tiers: dict[Tier, int]  # chunks as bits
    first: dict[str, int]  # group -> number of the first token in its pages
    pages: dict[str, torch.Tensor]  # group -> uint8


class LoadedRows(NamedTuple):
    """What ``PrefixCache.load_rows`` restored."""

    past: DynamicCache
    columns: int  #: that ``past`` holds, of all rows
    tiers: dict[Tier, int]  #: restored tokens of all rows, without padding, by the slowest tier of their pages


class PrefixCache:
    """Loads and saves prefixes of one model. Created by ``namespace_for``; any thread may use it.

    Delegates storage to the namespace, and checks of the model to ``ModelSource``. ``reason`` says why the last
    load or save on this object was declined entirely or in part; "" if it was not. ``tiers``: the tokens that the last
    load restored, as ``LoadedRows.tiers``.
    """

    def __init__(self, namespace: Namespace, source: ModelSource) -> None:
        self.namespace = namespace
        self.source = source
        self.reason = ""
        self.tiers: dict[Tier, int] = {}
        self._page_tokens = namespace.layout.page_tokens
        self._groups = namespace.layout.groups
        # of a window, only the keys at the end of the match are stored
        self._exact = any(group.need.kind != "all" for group in self._groups)

    @property
    def model(self) -> Any:
        return self.source.model

    # -- loading -----------------------------------------------------------------------------

    def load(self, input_ids: Any, attention_mask: Any = None) -> tuple[DynamicCache, int]:
        """A cache for ``model.generate(input_ids, past_key_values=...)``, and how many columns it holds.

        ``input_ids``: [n] or [batch, n] integers; ``attention_mask`` if rows are padded on the left. At least
        one token of each row is left to compute, so the second result is less than n; 0 with an empty cache is
        a miss. All rows of a batch end in the same column, that of the shortest prefix found. With window
        layers, paddings must differ by multiples of ``page_tokens``; otherwise nothing is restored.

        Window layers of the returned cache keep the history that they compute, so that ``save`` can store any
        page of it: while generating, the cache takes the memory of full attention. The restored pages occupy
        host memory until the last layer is filled. ConfigError for inputs of a wrong kind.
        """
        return self.load_rows(rows_of(input_ids, attention_mask))[:2]

    def load_rows(self, rows: Sequence[PromptRow]) -> LoadedRows:
        """``load``, with the tiers that the pages of this request came from."""
        self.reason, self.tiers = self.source.changed(), {}
        columns, loaded = (0, []) if self.reason else self._restore(rows)
        past = self._empty()
        if columns:
            self._fill(past, rows, columns, loaded)
        self.tiers = tiers = self._tiers(rows, columns, loaded)
        return LoadedRows(past, columns, tiers)

    def _tiers(self, rows: Sequence[PromptRow], columns: int, loaded: Sequence[_Loaded]) -> dict[Tier, int]:
        """Tokens by tier; of a page of which ``past`` has only the beginning, those tokens."""
        size, counts = self._page_tokens, dict.fromkeys(Tier, 0)
        for row, one in zip(rows, loaded, strict=False):  # a miss has loaded nothing
            for tier, chunks in one.tiers.items():
                counts[tier] += sum(max(0, min(size, columns - row.pad - c * size)) for c in members(chunks))
        return {tier: tokens for tier, tokens in counts.items() if tokens}

    def _empty(self) -> DynamicCache:
        past = DynamicCache(config=self.model.config)
        for group in self._groups:
            if group.need.kind == "window":
                for number in group.layers:
                    past.layers[number] = RecordingLayer(group.need.window)
        return past

    def _restore(self, rows: Sequence[PromptRow]) -> tuple[int, list[_Loaded]]:
        if self._exact and len({row.pad % self._page_tokens for row in rows}) > 1:
            self.reason = f"window layers: paddings do not differ by multiples of {self._page_tokens} tokens"
            return 0, []
        limits = [len(row.tokens) - 1 for row in rows]
        for _ in range(ATTEMPTS):
            with ExitStack() as stack:
                columns, matches = self._agree(rows, limits, stack)
                loaded = [self._read(match) for match in matches] if columns else []
            if not columns:
                break
            if not self._exact:
                return min(row.pad + one.tokens for row, one in zip(rows, loaded, strict=True)), loaded
            short = [one.tokens < match.tokens for one, match in zip(loaded, matches, strict=True)]
            if not any(short):
                return columns, loaded
            limits = [m.tokens - 1 if bad else m.tokens for m, bad in zip(matches, short, strict=True)]
        return 0, []

    def _agree(
        self, rows: Sequence[PromptRow], limits: Sequence[int], stack: ExitStack
    ) -> tuple[int, list[PrefixMatch]]:
        """The column at which the stored prefixes of all rows can end, and the matches up to it."""
        while True:
            matches = [
                stack.enter_context(self.namespace.match(row.tokens[: max(0, limit)]))
                for row, limit in zip(rows, limits, strict=True)
            ]
            columns = min(row.pad + match.tokens for row, match in zip(rows, matches, strict=True))
            ends = [max(0, columns - row.pad) for row in rows]
            if not self._exact or ends == [match.tokens for match in matches]:
                return columns, matches
            limits = ends  # shorter for at least one row, so the loop terminates

    def _read(self, match: PrefixMatch) -> _Loaded:
        pages = {g.name: torch.empty(match.page_count(g.name) * g.page_bytes, dtype=torch.uint8) for g in self._groups}
        first = {g.name: match.first_page(g.name) * self._page_tokens for g in self._groups}
        tiers = self.namespace.get_tiers(match, pages) if match.tokens else {}
        return _Loaded(sum(chunks.bit_count() for chunks in tiers.values()) * self._page_tokens, tiers, first, pages)

    def _fill(self, past: DynamicCache, rows: Sequence[PromptRow], columns: int, loaded: Sequence[_Loaded]) -> None:
        devices = self.source.devices()
        for group in self._groups:
            window = group.need.window
            for position, number in enumerate(group.layers):
                layer, device = past.layers[number], devices[number]
                keep = min(columns, window - 1) if window else columns
                states = [self._states(row, columns, keep, one, group, position, device)
                          for row, one in zip(rows, loaded, strict=True)]  # fmt: skip
                keys, values = (_batch([pair[part] for pair in states]) for part in (0, 1))
                layer.update(keys[:, :, :0], values[:, :, :0])  # no tokens: dtype and device only
                layer.keys, layer.values = keys, values
                if window:
                    layer.cumulative_length = columns

    def _states(
        self, row: PromptRow, columns: int, keep: int, one: _Loaded, group: Group, position: int, device: torch.device
    ) -> list[torch.Tensor]:
        """Keys and values [head, keep, dim] of the ``keep`` columns before ``columns``, zero where padded."""
        end, begin = max(0, columns - row.pad), max(0, columns - keep - row.pad)
        first = one.first[group.name]
        states = states_of(one.pages[group.name], group, self.source.dtype, position, device)
        pair = [x[:, begin - first : end - first] for x in states]
        zeros = keep - (end - begin)
        return [pad_with_zeros(x, (0, 0, zeros, 0)) for x in pair] if zeros else pair

    # -- saving ------------------------------------------------------------------------------

    def save(self, token_ids: Any, past_key_values: Any, attention_mask: Any = None) -> PutResult:
        """Store the full pages of ``past_key_values`` that are not stored yet; counts are pages of all rows.

        ``token_ids``: [n] or [batch, n], the tokens of the cache's columns; tokens beyond the cache (the last
        one of ``generate``) and columns beyond the tokens are left out. Do not save a cache after beam search
        or with an assistant: its columns do not belong to these tokens.
        ``attention_mask`` as given to ``load``; columns that it lacks are real tokens. Pages that begin before
        the history of a window layer are not stored: those of a cache that did not come from ``load`` end a
        token short of what a restore needs, unless it is ``DynamicCache()`` without a config. A cache that is
        unsupported, or of another model, is declined entirely.
        """
        return self.save_rows(rows_of(token_ids, attention_mask), past_key_values)

    def save_rows(self, rows: Sequence[PromptRow], past: Any) -> PutResult:
        """``save``, for rows of unequal length."""
        self.reason = self.source.changed() or self._misfit(past, len(rows))
        total = PutResult(0, 0, 0)
        for number, row in enumerate(rows):
            done = self._declined(row) if self.reason else self._save_row(row, number, past)
            total = _sum(total, done)
        self.reason = total.reason
        return total

    def _declined(self, row: PromptRow) -> PutResult:
        return PutResult(0, 0, len(row.tokens) // self._page_tokens * len(self._groups), 0, self.reason)

    def _misfit(self, past: Any, batch: int) -> str:
        """Why the content of ``past`` is not what the layout describes; "" if it is."""
        if type(past) is not DynamicCache or past.offloading:
            return f"cache: a {type(past).__name__}, offloaded or of an unsupported kind: pass the cache of load()"
        if len(past.layers) != sum(len(group.layers) for group in self._groups):
            return f"cache: {len(past.layers)} layers, empty or of another model: pass the cache of load()"
        lengths = {layer.get_seq_length() for layer in past.layers}
        if len(lengths) > 1 or 0 in lengths:
            return f"cache: layers hold {sorted(lengths)} tokens"
        for group in self._groups:
            shapes = [(batch, group.heads, dim) for dim in cell_dims(group)]
            for number in group.layers:
                layer = past.layers[number]
                if not fits(layer, group):
                    return f"cache: layer {number} is an unsupported {type(layer).__name__}: pass the cache of load()"
                for tensor, shape in zip((layer.keys, layer.values), shapes, strict=True):
                    if (*tensor.shape[:2], *tensor.shape[3:]) != shape or tensor.dtype != self.source.dtype:
                        return f"cache: layer {number} holds {tensor.dtype} {list(tensor.shape)}"
        return ""

    def _save_row(self, row: PromptRow, number: int, past: DynamicCache) -> PutResult:
        columns = past.get_seq_length()
        tokens = row.tokens[: max(0, columns - row.pad)]
        plan = self.namespace.plan_save(tokens)
        missing = {group.name: self._retained(plan, group, row, past) for group in self._groups}
        stored = sum(plan.chunks - len(chunks) for chunks in plan.missing.values())
        total = PutResult(0, stored, 0)
        for last, piece in self._pieces(missing):
            count = sum(map(len, piece.values()))
            if total.declined:  # later pages could not be restored without it
                total = _sum(total, PutResult(0, 0, count))
                continue
            pages = {g.name: self._gather(g, piece[g.name], row, number, past) for g in self._groups if g.name in piece}
            offered = sum(chunks[-1] + 1 - chunks[0] for chunks in piece.values())
            start = {name: chunks[0] for name, chunks in piece.items()}
            try:
                done = self.namespace.put(tokens[: (last + 1) * self._page_tokens], pages, start)
            except StoreReadOnlyError:
                done = PutResult(0, 0, offered, 0, "read-only")
            again = min(done.skipped, offered - count)  # stored pages between missing ones, already counted
            total = _sum(total, done._replace(skipped=done.skipped - again))
        return total

    def _retained(self, plan: SavePlan, group: Group, row: PromptRow, past: DynamicCache) -> list[int]:
        """Missing chunks of ``group`` of which all layers still hold every token."""
        layers = [past.layers[number] for number in group.layers]
        begin = max(layer.get_seq_length() - layer.keys.shape[-2] for layer in layers) - row.pad
        return [chunk for chunk in plan.missing[group.name] if chunk * self._page_tokens >= begin]

    def _pieces(self, missing: dict[str, list[int]]) -> Iterator[tuple[int, dict[str, list[int]]]]:
        """(last chunk, missing chunks per group) of pieces of at most SAVE_BYTES."""
        chunks = sorted({chunk for wanted in missing.values() for chunk in wanted})
        step = max(1, SAVE_BYTES // self.namespace.layout.page_bytes)
        while chunks:
            end = chunks[0] + step
            piece = {name: [c for c in wanted if chunks[0] <= c < end] for name, wanted in missing.items()}
            chunks = [c for c in chunks if c >= end]
            piece = {name: wanted for name, wanted in piece.items() if wanted}
            yield max(wanted[-1] for wanted in piece.values()), piece

    def _gather(
        self, group: Group, chunks: Sequence[int], row: PromptRow, number: int, past: DynamicCache
    ) -> torch.Tensor:
        """Pages of ``group`` from the first to the last of ``chunks``."""
        begin, end = (c * self._page_tokens for c in (chunks[0], chunks[-1] + 1))

        def states() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for layer in (past.layers[i] for i in group.layers):
                # column of the first retained token
                origin = layer.get_seq_length() - layer.keys.shape[-2] - row.pad
                span = slice(begin - origin, end - origin)
                yield layer.keys[number, :, span].detach(), layer.values[number, :, span].detach()

        return pages_of(states(), end - begin, group, self.source.dtype)


def _batch(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[batch, head, token, dim], contiguous; a single contiguous row is not copied."""
    return rows[0].unsqueeze(0).contiguous() if len(rows) == 1 else torch.stack(list(rows))


def _sum(one: PutResult, two: PutResult) -> PutResult:
    stored, skipped, declined, in_flight = (a + b for a, b in zip(one[:4], two[:4], strict=True))
    return PutResult(stored, skipped, declined, in_flight, one.reason or two.reason)

"""codecs: compression ratio and cost of each codec for the KV cache of a model.

The KV is that of a prompt, the text of this repository, cut into canonical pages of one dtype each. Without --model the
model is that of the demo, with random weights: its KV has no outliers, and no structure except that of its
activations, so its ratios say little about a trained model. --model names a trained one: a .gguf file, or a folder that
transformers can read. First each codec alone in one thread, against a memcpy of the same pages; then stores with each
codec against a raw one: put, get from the page cache, and get after the files were dropped from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import kvfs
from kvfs import PageLayout
from kvfs.format import codec
from kvfs.format.checksums import leaf_table
from tools.benchmarks.case import drop_cache
from tools.benchmarks.measure import BenchError, Contender, Sample, Spread, Stopwatch, interleave, rate_ratio
from tools.benchmarks.report import Report, Table
from tools.demo import _describe, _model, _text, _tokenize

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8")
CODECS = ("zstd", "planes")
REVISION = "0" * 40


@dataclass(frozen=True)
class Plan:
    model: Path | None
    tokens: int
    page_tokens: int
    dtypes: tuple[str, ...]
    rounds: int
    threads: int

    @property
    def need_bytes(self) -> int:
        return 8 << 30


@dataclass(frozen=True)
class Pages:
    """The KV of a prompt in one dtype, as consecutive pages."""

    layout: PageLayout
    data: bytes

    def __iter__(self) -> Any:
        size = self.layout.page_bytes
        view = memoryview(self.data)
        return (view[at : at + size] for at in range(0, len(view), size))


def run(report: Report, folder: Path, plan: Plan) -> None:
    keys, values, about = _compute(plan)
    alone = Table(f"codecs: one thread, {about}")
    stored = Table(f"codecs: stores, {plan.threads} threads")
    for dtype in plan.dtypes:
        pages = _pages(keys, values, dtype, plan.page_tokens)
        _alone(alone, pages, dtype, plan.rounds)
        if dtype == plan.dtypes[0]:
            _stores(stored, pages, dtype, folder, plan)
    alone.notes.append("encode as put does it: codec and checksums of the raw bytes; decode as get does it, likewise")
    report.show(alone)
    report.show(stored)


# -- the pages -------------------------------------------------------------------------------


def _compute(plan: Plan) -> tuple[Any, Any, str]:
    """Keys and values of the prompt, each [layer, head, token, dim], and a description of their origin."""
    import torch

    if plan.model is None:
        model, ids = _model(plan.tokens), torch.tensor([_tokenize(_text(), plan.tokens)])
        about = f"random weights: {_describe(model)}"
    else:
        model, ids = _trained(plan.model, plan.tokens)
        about = f"trained: {plan.model.name}"
    if ids.shape[1] < plan.page_tokens:
        raise BenchError(
            f"the prompt has {ids.shape[1]} tokens, a page {plan.page_tokens}: pass --tokens or --page-tokens"
        )
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    keys, values = (torch.cat([getattr(layer, name) for layer in cache.layers]) for name in ("keys", "values"))
    return keys, values, f"{about}, {ids.shape[1]} tokens"


def _trained(path: Path, tokens: int) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(path)}
    if path.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(**where, local_files_only=True, dtype=torch.float32).eval()
    return model, tokenizer(_text()[: 8 * tokens], return_tensors="pt").input_ids[:, :tokens]


def _pages(keys: Any, values: Any, dtype: str, page_tokens: int) -> Pages:
    """Canonical pages: granule, layer, head, token, cell; a cell is K, then V."""
    import torch

    layers, heads, tokens, dim = keys.shape
    how = {} if torch.empty(0, dtype=getattr(torch, dtype)).itemsize > 1 else {"scale_digest": "unit"}
    layout = PageLayout.kv(
        layers=layers, kv_heads=heads, head_dim=dim, v_head_dim=values.shape[3], dtype=dtype, page_tokens=page_tokens,
        **how,
    )  # fmt: skip
    cells = torch.cat([_as(keys, dtype), _as(values, dtype)], dim=3)
    count = tokens // page_tokens
    cells = cells[:, :, : count * page_tokens].reshape(layers, heads, count * page_tokens // 16, 16, -1)
    ordered = cells.permute(2, 0, 1, 3, 4).contiguous()
    data = ordered.view(torch.uint8).numpy().tobytes()
    assert len(data) == count * layout.page_bytes
    return Pages(layout, data)


def _as(values: Any, dtype: str) -> Any:
    """The values in another dtype; int8 with one scale per layer, head and channel, as in engines."""
    import torch

    if dtype != "int8":
        return values.to(getattr(torch, dtype))
    scale = values.abs().amax(dim=2, keepdim=True).clamp(min=1e-8) / 127
    return (values / scale).round().to(torch.int8)


# -- the codecs alone ------------------------------------------------------------------------


def _alone(table: Table, pages: Pages, dtype: str, rounds: int) -> None:
    (group,) = pages.layout.groups
    leaf, element = group.leaf_bytes(group.full), group.cell.element_bytes
    target = memoryview(bytearray(pages.layout.page_bytes))
    made = {name: [codec.encode(page, codec.CODECS[name], element) for page in pages] for name in CODECS}
    for name, stored in made.items():
        for (used, data), page in zip(stored, pages, strict=True):
            if codec.decoded(data, used, len(page)) != page:
                raise BenchError(f"{name} gave another page")

    def timed(calls: list[Callable[[], object]]) -> Sample:
        watch = Stopwatch()
        with watch:
            for call in calls:
                call()
        return watch.sample(len(pages.data))

    def copy(page: memoryview) -> None:
        target[:] = page

    def encode(page: memoryview, number: int) -> None:
        codec.encode(page, number, element)
        leaf_table(page, leaf)

    def decode(data: Any, used: int) -> None:
        codec.decode(data, used, target)
        leaf_table(target, leaf)

    contenders = [
        Contender("memcpy", partial(timed, [partial(copy, page) for page in pages])),
        Contender("sums", partial(timed, [partial(leaf_table, page, leaf) for page in pages])),
    ]
    for name in CODECS:
        contenders += [
            Contender(f"encode {name}", partial(timed, [partial(encode, p, codec.CODECS[name]) for p in pages])),
            Contender(f"decode {name}", partial(timed, [partial(decode, data, used) for used, data in made[name]])),
        ]
    samples = interleave(contenders, rounds)
    base = samples["memcpy"]
    shape: dict[str, Any] = {"dtype": dtype, "page": f"{pages.layout.page_bytes >> 10} KiB"}
    rows = [("raw", 1.0, samples["sums"], samples["sums"])]
    for name in CODECS:
        ratio = len(pages.data) / sum(len(data) for _, data in made[name])
        rows.append((name, ratio, samples[f"encode {name}"], samples[f"decode {name}"]))
    for name, ratio, into, out in rows:
        table.add(
            **shape, codec=name, ratio=ratio, encode=_rate(into), encode_to_memcpy=rate_ratio(into, base),
            encode_cpu_s_per_GB=_cpu(into), decode=_rate(out), decode_to_memcpy=rate_ratio(out, base),
            decode_cpu_s_per_GB=_cpu(out),
        )  # fmt: skip


def _rate(samples: list[Sample]) -> Spread:
    return Spread.of([s.gb_per_second for s in samples])


def _cpu(samples: list[Sample]) -> float:
    return Spread.of([s.cpu_seconds_per_gb for s in samples]).middle


# -- stores ----------------------------------------------------------------------------------


def _stores(table: Table, pages: Pages, dtype: str, folder: Path, plan: Plan) -> None:
    """A store per codec. Each put is of a new prompt and is not synced."""
    count = len(pages.data) // pages.layout.page_bytes
    capacity = max(64 << 20, 4 * (plan.rounds + 2) * len(pages.data))
    stores = {
        name: kvfs.open(folder / f"codec-{name}", capacity=capacity, codec=name, threads=plan.threads)
        for name in ("raw", *CODECS)
    }
    out = bytearray(len(pages.data))
    try:
        contenders = []
        for name, store in stores.items():
            ns = store.namespace("model", pages.layout, REVISION)
            first = _tokens(0, count * pages.layout.page_tokens)
            ns.put(first, pages.data)
            store._shared.services().active.finish_all()
            files = sorted((folder / f"codec-{name}" / "segments").iterdir())
            numbers = iter(range(1, 1 << 20))
            contenders += [
                Contender(f"get {name}", partial(_get, ns, first, out, pages.data)),
                Contender(f"cold {name}", partial(_get, ns, first, out, pages.data), partial(drop_cache, files)),
                Contender(f"put {name}", partial(_put, ns, numbers, pages)),
            ]
        samples = interleave(contenders, plan.rounds)
        for name, store in stores.items():
            counters = store.stats()["counters"]
            saved = counters.get("bytes_saved", 0)
            row: dict[str, Any] = {"dtype": dtype, "codec": name, "ratio": 1 + saved / counters["bytes_written"]}
            for what in ("put", "get", "cold"):
                ours = samples[f"{what} {name}"]
                row |= {f"{what} GB/s": _rate(ours), f"{what} to raw": rate_ratio(ours, samples[f"{what} raw"])}
            table.add(**row)
    finally:
        for store in stores.values():
            store.close()


def _tokens(prompt: int, count: int) -> list[int]:
    return list(range(prompt * count, (prompt + 1) * count))


def _put(ns: kvfs.Namespace, numbers: Any, pages: Pages) -> Sample:
    count = len(pages.data) // pages.layout.page_bytes
    tokens, watch = _tokens(next(numbers), count * pages.layout.page_tokens), Stopwatch()
    with watch:
        done = ns.put(tokens, pages.data)
    if done.stored != count:
        raise BenchError(f"{done} of {count} pages")
    return watch.sample(len(pages.data))


def _get(ns: kvfs.Namespace, tokens: list[int], out: bytearray, expected: bytes) -> Sample:
    out[:8] = bytes(8)
    watch = Stopwatch()
    with watch, ns.match(tokens) as match:
        ns.get(match, out)
    if out != expected:
        raise BenchError("get gave other bytes")
    return watch.sample(len(expected))

"""The seed of a worker: transformers on a GPU whose prompts' KV outlives it, restored layer by layer.

    python -m tools.gpu_worker [--tokens N,...] [--path DIR] [--weights-gib N]

A Llama of 8B's shape with random weights. Four processes, each with a new CUDA context:

    A  computes the prompt (scaled dot product attention of torch), its first token, and saves the KV
    B  restores it from the page cache, after a file as large as the weights was read, and computes the rest
    C  the same, but what was used last was pinned before the first request came
    D  restores it from the disk: the page cache was dropped

Time to first token is from the request to the token, the model loaded and the store attached; compute starts with
layer 0 while later layers are still coming. The KV must be the same in all four, bit for bit, and so must the first
token; the following ones are shown, but at 32k tokens the model itself does not repeat them from the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvfs
from kvfs.pages.layout import PageLayout

SECONDS = 120.0
REST = 8  # tokens behind the last whole page: those are computed
FIRST = 16  # tokens that are compared
LAYERS, HEADS, DIM = 32, 8, 128
PIN_BYTES = 16 << 30
LAYOUT = PageLayout.kv(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16", page_tokens=64)
ORDER = "batch,head,token,dim"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.gpu_worker", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", default="16384,32768", help="prompt lengths, multiples of 64")
    parser.add_argument("--path", default=tempfile.gettempdir(), help="where the store is made, and removed")
    parser.add_argument("--weights-gib", type=int, default=16, help="size of the file that is read before B")
    parser.add_argument("--role", choices="ABCD", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    lengths = [int(n) for n in args.tokens.split(",")]
    if any(n < 64 or n % 64 for n in lengths):
        parser.error(f"--tokens is {args.tokens}: pass multiples of 64")
    if args.role:
        print(json.dumps(_role(args.role, Path(args.path), lengths)))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="kvfs-worker-", dir=args.path))
    try:
        return _compare(folder, args.tokens, args.weights_gib)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compare(folder: Path, tokens: str, weights_gib: int) -> int:
    results = {}
    for role in "ABCD":
        if role == "B":
            _read_weights(folder / "weights", weights_gib)
        if role == "D":
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")  # needs root
        command = [sys.executable, "-m", "tools.gpu_worker", "--role", role, "--tokens", tokens, "--path", str(folder)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
        results[role] = json.loads(done.stdout.splitlines()[-1])
    print(
        "tokens  recomputed   restored warm        again          pinned ahead     restored cold    layer 0 after  KV"
        "  tokens identical"
    )
    same = True
    for i, row in enumerate(results["A"]):
        rows = a, b, c, d = [results[role][i] for role in "ABCD"]
        equal = len({r["kv"] for r in rows}) == 1
        agree = next((n for n in range(FIRST) if len({r["first"][n] for r in rows}) > 1), FIRST)
        same = same and equal and agree > 0
        full, warm, again, ahead, cold = a["seconds"], b["seconds"], b["again"], c["seconds"], d["seconds"]
        print(
            f"{row['tokens']:>6}  {full * 1e3:>7.0f} ms  {warm * 1e3:>7.1f} ms ({full / warm:.0f}x)"
            f"  {again * 1e3:>7.1f} ms ({full / again:.0f}x)  {ahead * 1e3:>7.1f} ms ({full / ahead:.0f}x)"
            f"  {cold * 1e3:>7.0f} ms ({full / cold:.1f}x)"
            f"  {b['layer0'] * 1e3:>7.1f} ms  {'same' if equal else 'DIFFERS'}  the first {agree} of {FIRST}"
        )
    ahead = results["C"][0]
    print(
        f"attach {results['B'][0]['attach']:.1f} s, transport {results['B'][0]['transport']}; "
        f"pinned ahead: {ahead['pinned'] / (1 << 30):.1f} GiB in {ahead['pinning'] * 1e3:.0f} ms"
    )
    return 0 if same else 1


def _read_weights(file: Path, gib: int) -> None:
    """What loading a model does to the page cache."""
    block = os.urandom(1 << 20) * 64
    with file.open("wb") as out:
        for _ in range(gib * 16):
            out.write(block)
    os.sync()
    with file.open("rb", buffering=0) as source:
        while source.read(64 << 20):
            pass
    file.unlink()


def _role(role: str, folder: Path, lengths: list[int]) -> list[dict[str, Any]]:
    import torch

    model = _model(torch)
    with kvfs.open(folder / "store", capacity="24GiB", segment_bytes="256MiB") as store:
        ns = store.namespace("llama-8b-shape", LAYOUT, "random")
        if role == "A":
            return [_compute(torch, model, ns, _prompt(n)) for n in lengths]
        worker = Worker(torch, model, ns, max(lengths) + REST + FIRST, ahead=PIN_BYTES if role == "C" else 0)
        return [worker.serve(_prompt(n), again=role == "B") for n in lengths]


def _model(torch: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=LAYERS, num_attention_heads=32,
        num_key_value_heads=HEADS, vocab_size=32000, max_position_embeddings=65536, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    with torch.inference_mode():  # loads the kernels of a prompt, of its rest and of single tokens
        past = model(torch.arange(1, 1025, device="cuda")[None], use_cache=True, logits_to_keep=1).past_key_values
        for count in (REST, 1):
            int(model(torch.ones(1, count, dtype=torch.int64, device="cuda"), past_key_values=past).logits.argmax())
    return model


def _prompt(tokens: int) -> list[int]:
    return [(i * 7919 + tokens) % 31_000 + 1 for i in range(tokens + REST)]


def _continue(torch: Any, model: Any, past: Any, logits: Any) -> list[int]:
    """The first token and the following ones."""
    first = []
    for _ in range(FIRST):
        first.append(int(logits[0, -1].argmax()))
        logits = model(torch.tensor([[first[-1]]], device="cuda"), past_key_values=past, logits_to_keep=1).logits
    return first


def _compute(torch: Any, model: Any, ns: kvfs.Namespace, prompt: list[int]) -> dict[str, Any]:
    ids = torch.tensor([prompt], device="cuda")
    with torch.inference_mode():
        model(ids, use_cache=True, logits_to_keep=1)  # a first run pays for what later ones do not
        torch.cuda.synchronize()
        begin = time.perf_counter()
        out = model(ids, use_cache=True, logits_to_keep=1)
        int(out.logits[0, -1].argmax())
        seconds = time.perf_counter() - begin
        # the others compute the rest of the prompt apart: for equal tokens the sums must be made in the same order
        out = model(ids[:, :-REST], use_cache=True, logits_to_keep=1)
        tensors = [(layer.keys.contiguous(), layer.values.contiguous()) for layer in out.past_key_values.layers]
        with ns.attach(kvfs.describe(LAYOUT.groups[0], tensors, ORDER), ring_bytes="6GiB") as io:
            written = torch.cuda.Event()
            written.record()
            result = io.save(ns.plan_save(prompt), range(len(prompt) - REST), written, deadline=SECONDS).wait(SECONDS)
        if result is None or result.declined:
            raise SystemExit(f"the save ended with {result}")
        past = out.past_key_values
        first = _continue(torch, model, past, model(ids[:, -REST:], past_key_values=past, logits_to_keep=1).logits)
        kv = _digest(torch, tensors, len(prompt) - REST)
    return {"tokens": len(prompt) - REST, "seconds": seconds, "first": first, "kv": kv}


def _digest(torch: Any, tensors: Sequence[Any], tokens: int) -> int:
    """Of the KV of the first tokens: a weighted sum, in which every word and its place count."""
    total = 0
    for tensor in (tensor for pair in tensors for tensor in pair):
        words = tensor[:, :, :tokens].contiguous().view(torch.int64).flatten()
        places = torch.arange(1, len(words) + 1, device="cuda", dtype=torch.int64) * 0x1E3779B97F4A7C15 | 1
        total = (total * 31 + int((words * places).sum())) % (1 << 64)
    return total


class Worker:
    """A model with KV memory of its own, attached to a store."""

    def __init__(self, torch: Any, model: Any, ns: kvfs.Namespace, tokens: int, *, ahead: int) -> None:
        self._torch, self._model, self._ns = torch, model, ns
        shape = (1, HEADS, tokens, DIM)
        self._tensors = [
            tuple(torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)) for _ in range(LAYERS)
        ]
        begin = time.perf_counter()
        self._io: Any = ns.attach(kvfs.describe(LAYOUT.groups[0], self._tensors, ORDER), registered_bytes=PIN_BYTES)
        self.attach_seconds = time.perf_counter() - begin
        self.pinned = self._io.warm_hottest(ahead) if ahead else 0
        self.pinning_seconds = time.perf_counter() - begin - self.attach_seconds

    def serve(self, prompt: list[int], *, again: bool) -> dict[str, Any]:
        seconds, layer0, first = self._answer(prompt)
        row = {
            "tokens": len(prompt) - REST, "seconds": seconds, "layer0": layer0, "first": first,
            "attach": self.attach_seconds, "transport": self._io.transport,
            "pinned": self.pinned, "pinning": self.pinning_seconds,
            "kv": _digest(self._torch, self._tensors, len(prompt) - REST),
        }  # fmt: skip
        return {**row, "again": self._answer(prompt)[0]} if again else row

    def _answer(self, prompt: list[int]) -> tuple[float, float, list[int]]:
        """(seconds to the first token, until layer 0 was there, the first tokens)."""
        torch = self._torch
        for pair in self._tensors:
            for tensor in pair:
                tensor.fill_(float("nan"))
        free = torch.cuda.Event()
        free.record()
        free.synchronize()
        begin = time.perf_counter()
        with self._ns.match(prompt, leave=1) as match, torch.inference_mode():
            transfer = self._io.load(match, range(match.tokens), free, layerwise=True)
            past = _arriving(self._tensors, match.tokens, transfer)
            ids = torch.tensor([prompt[match.tokens :]], device="cuda")
            logits = self._model(ids, past_key_values=past, logits_to_keep=1).logits
            result = transfer.wait(SECONDS)
            int(logits[0, -1].argmax())
            seconds = time.perf_counter() - begin
            if result is None or result.tokens != len(prompt) - REST:  # a worker would recompute from there
                raise SystemExit(f"the load ended with {result}")
            return seconds, past.layers[0].waited_until - begin, _continue(torch, self._model, past, logits)


def _arriving(tensors: Sequence[Any], tokens: int, transfer: kvfs.Transfer) -> Any:
    """A cache over ``tokens`` tokens whose layers are used when they have come."""
    from transformers.cache_utils import Cache, DynamicLayer

    class ArrivingLayer(DynamicLayer):
        def __init__(self, number: int) -> None:
            super().__init__()
            keys, values = tensors[number]
            self.lazy_initialization(keys, values)
            self.keys, self.values = keys[:, :, :tokens], values[:, :, :tokens]
            self.number, self.waited_until = number, 0.0

        def update(self, *args: Any, **kwargs: Any) -> Any:
            if not self.waited_until:
                transfer.layer_ready(self.number).wait(SECONDS)
                self.waited_until = time.perf_counter()
            return super().update(*args, **kwargs)

    return Cache(layers=[ArrivingLayer(n) for n in range(LAYERS)])


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())

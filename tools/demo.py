"""Save a prompt's KV cache in one process, restore it in another, and measure both.

    python -m tools.demo [--tokens N] [--path DIR] [--keep]

Three processes build the same Llama (random weights from one seed, so nothing is downloaded) and generate from
the same prompt, the text of this repository:

    A  computes the prompt, generates, and saves the KV cache in a new store
    B  is a new process, restores the KV cache from the store, and computes only the rest
    C  computes everything without a store, for comparison

Exits with 1 unless the three outputs are equal and B restored something.
"""

from __future__ import annotations

import argparse
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

ROOT = Path(__file__).resolve().parents[1]
NEW_TOKENS = 32
VOCABULARY = 1024
CAPACITY = "4GiB"
CHILD_SECONDS = 900  # longest run of one process
COLUMNS = ("A cold", "B warm", "C cold, no store")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns the exit status."""
    args = _arguments(argv)
    if args.role:
        return _child(args.role, Path(args.work), Path(args.path))
    if args.path and Path(args.path).exists():
        print(f"{args.path} exists: pass a directory that does not exist", file=sys.stderr)
        return 2
    work = Path(tempfile.mkdtemp(prefix="kvfs-demo-"))
    store = Path(args.path).resolve() if args.path else work / "store"
    try:
        return _compare(args.tokens, work, store)
    finally:
        if args.keep:
            print(f"kept: {store}")
        else:
            shutil.rmtree(store, ignore_errors=True)
        if not (args.keep and store.is_relative_to(work)):
            shutil.rmtree(work, ignore_errors=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools.demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompt (default 4096)")
    parser.add_argument("--path", help="where to create the store (default: a temporary directory)")
    parser.add_argument("--keep", action="store_true", help="do not remove the store afterwards")
    parser.add_argument("--role", choices=COLUMNS, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not 128 <= args.tokens <= 32768:
        parser.error(f"--tokens is {args.tokens}: pass 128 to 32768")
    return args


# ---------------------------------------------------------------- the parent


def _compare(tokens: int, work: Path, store: Path) -> int:
    text = _text()
    ids = _tokenize(text, tokens)
    (work / "prompt.json").write_text(json.dumps(ids), encoding="utf-8")
    print(f"prompt: {len(ids)} tokens of this repository's own text, byte-level BPE of {VOCABULARY} entries")
    results = []
    for role in COLUMNS:
        print(f"running {role} ...", flush=True)
        results.append(_run(role, work, store))
        if results[-1] is None:
            return 1
    return _report([r for r in results if r is not None], store)


def _text() -> str:
    """The documentation, followed by the sources."""
    paths = [
        ROOT / "README.md",
        *sorted(ROOT.glob("docs/**/*.md")),
        ROOT / "LICENSE",
        *sorted(ROOT.glob("kvfs/**/*.py")),
    ]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())


def _tokenize(text: str, tokens: int) -> list[int]:
    """The first ``tokens`` tokens of the text, by a tokenizer trained on the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    ids: list[int] = tokenizer.encode(text).ids[:tokens]
    if not text.startswith(tokenizer.decode(ids).rstrip("\ufffd")):
        raise RuntimeError("the tokenizer does not reproduce the text")
    return ids


def _run(role: str, work: Path, store: Path) -> dict[str, Any] | None:
    """Run one process. Returns its measurements; None if it failed."""
    command = [sys.executable, "-m", "tools.demo", "--role", role, "--work", str(work), "--path", str(store)]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CHILD_SECONDS, check=False
    )
    if done.returncode:
        print(f"{role} failed:\n{done.stdout}{done.stderr}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads((work / f"{role}.json").read_text(encoding="utf-8"))
    return result


def _report(results: Sequence[dict[str, Any]], store: Path) -> int:
    a, b, c = results
    rows = [
        ("prompt tokens", [r["prompt"] for r in results]),
        ("tokens restored", [r["restored"] for r in results]),
        ("time to first token", [f"{r['first']:.2f} s" for r in results]),
        (f"time to {NEW_TOKENS} tokens", [f"{r['last']:.2f} s" for r in results]),
        ("save, after the last token", [f"{r['save']:.2f} s" if r["save"] else "-" for r in results]),
        ("open, digest of weights", [f"{r['attach']:.2f} s" if r["attach"] else "-" for r in results]),
    ]
    identical = a["output"] == b["output"] == c["output"]
    ratio = min(a["first"], c["first"]) / b["first"]
    size = sum(path.lstat().st_blocks * 512 for path in store.rglob("*")) / 2**20
    print(f"model: {a['model']}\n")
    print(f"{'':28}" + "".join(f"{name:>18}" for name in COLUMNS))
    for name, values in rows:
        print(f"{name:28}" + "".join(f"{value!s:>18}" for value in values))
    print(f"\ntime to first token, cold / warm: {ratio:.1f}")
    print(f"tokens identical: {'yes' if identical else 'NO'} ({len(set(a['output']))} different ones)")
    print(f"store size on disk: {size:.1f} MiB")
    print("B is a new process; its time includes lookup, reading (from the page cache) and checksums.")
    return 0 if identical and b["restored"] > 0 and a["restored"] == 0 else 1


# ---------------------------------------------------------------- the children


def _child(role: str, work: Path, store: Path) -> int:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    ids = torch.tensor([json.loads((work / "prompt.json").read_text(encoding="utf-8"))])
    model = _model(ids.shape[1])
    measure = _without_store if role == COLUMNS[2] else _with_store
    result = {"model": _describe(model), "prompt": ids.shape[1], **measure(model, ids, store)}
    (work / f"{role}.json").write_text(json.dumps(result), encoding="utf-8")
    return 0


def _model(tokens: int) -> Any:
    """The same weights in every process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=tokens + NEW_TOKENS, initializer_range=0.05,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _describe(model: Any) -> str:
    config = model.config
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    per_token = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * model.dtype.itemsize
    dtype = str(model.dtype).removeprefix("torch.")
    kind = f"{config.num_hidden_layers} layers, {dtype}, {config._attn_implementation}"
    return f"Llama of {millions:.0f} M random weights, {kind}; {per_token / 1024:.0f} KiB of KV per token"


def _with_store(model: Any, ids: Any, store: Path) -> dict[str, Any]:
    import kvfs
    from kvfs.integrations.transformers import generate, namespace_for

    begin = time.perf_counter()
    with kvfs.open(store, capacity=CAPACITY) as opened:
        cache = namespace_for(opened, model)
        attach = time.perf_counter() - begin
        watch = _watch()
        done = generate(model, cache, ids, streamer=watch, **_options())
        save = time.perf_counter() - watch.started - watch.times[-1]
    if done.saved.declined:
        raise RuntimeError(f"pages were declined: {done.saved}")
    return {"restored": done.restored, "attach": attach, "save": save, **_timed(watch, done.output, ids)}


def _without_store(model: Any, ids: Any, store: Path) -> dict[str, Any]:
    watch = _watch()
    output = model.generate(ids, streamer=watch, **_options())
    return {"restored": 0, "attach": 0, "save": 0, **_timed(watch, output, ids)}


def _options() -> dict[str, Any]:
    return {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}


def _timed(watch: Any, output: Any, ids: Any) -> dict[str, Any]:
    # the first call of a streamer is the prompt
    return {"first": watch.times[1], "last": watch.times[-1], "output": output[0, ids.shape[1] :].tolist()}


def _watch() -> Any:
    """A streamer that records the seconds from now until each token."""
    from transformers.generation.streamers import BaseStreamer

    class Watch(BaseStreamer):
        def __init__(self) -> None:
            self.started = time.perf_counter()
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter() - self.started)

        def end(self) -> None:
            pass

    return Watch()


if __name__ == "__main__":
    sys.exit(main())

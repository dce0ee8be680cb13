"""Conversations of a real llama.cpp server, saved into a mount and restored from it. Needs root and FUSE.

    pip install xllamacpp gguf        # llama.cpp's server as a wheel, and a writer of model files
    python -m tools.mount_llama

Makes a small model with random weights. Ten conversations with one system prompt of 4,000 tokens are saved with
``/slots/0?action=save``; then the server and the mount are stopped (``--kill``: the mount with SIGKILL) and started
again, and each is restored and continued. Then fifty more are saved into the store while a thread watches its size.
Prints what it found, and exits with 1 if a continuation differs, the store exceeds its limit, or a file is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvfs

MIB = 1 << 20
LAYERS, EMBED, HEADS, HEAD_DIM, FEED = 4, 128, 4, 64, 256
WORDS_FIRST, WORDS_END = 259, 1_000  # ids of tokens that are no bytes and no marks
SYSTEM_TOKENS, CONVERSATIONS, MORE = 4_000, 10, 50
START_SECONDS = 120.0
CONTINUATION = 32  # tokens


def make_model(path: Path) -> None:
    """Write a model of the llama family with random weights: 4 KiB of KV per token, in 16-bit floats."""
    import gguf
    import numpy as np

    draw = np.random.default_rng(0)
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_context_length(8_192)
    out.add_embedding_length(EMBED)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(FEED)
    out.add_head_count(HEADS)
    out.add_head_count_kv(HEADS)
    out.add_key_length(HEAD_DIM)
    out.add_value_length(HEAD_DIM)
    out.add_rope_dimension_count(HEAD_DIM)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_tokenizer_model("llama")
    words = [f"w{n}" for n in range(WORDS_FIRST, WORDS_END)]
    out.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])
    out.add_token_scores([0.0] * WORDS_END)
    out.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(words)])  # unknown, marks, bytes, words

    def matrix(name: str, rows: int, columns: int) -> None:
        out.add_tensor(name, (draw.standard_normal((rows, columns)) * 1.5 / columns**0.5).astype(np.float32))

    matrix("token_embd.weight", WORDS_END, EMBED)
    matrix("output.weight", WORDS_END, EMBED)
    out.add_tensor("output_norm.weight", np.ones(EMBED, np.float32))
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            out.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(EMBED, np.float32))
        for name in ("attn_q", "attn_k", "attn_v"):
            matrix(f"blk.{layer}.{name}.weight", HEADS * HEAD_DIM, EMBED)
        matrix(f"blk.{layer}.attn_output.weight", EMBED, HEADS * HEAD_DIM)
        matrix(f"blk.{layer}.ffn_gate.weight", FEED, EMBED)
        matrix(f"blk.{layer}.ffn_up.weight", FEED, EMBED)
        matrix(f"blk.{layer}.ffn_down.weight", EMBED, FEED)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def serve(model: str, slots: str) -> None:
    """Run llama.cpp's server with one slot; print its address. Never returns."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.slot_save_path = slots
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_ctx, params.n_parallel, params.endpoint_slots, params.warmup = 8_192, 1, True, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(60)


class Server:
    """llama.cpp's server in a process of its own."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            found: dict[str, Any] = json.loads(reply.read())
            return found

    def prefill(self, prompt: list[int]) -> None:
        self.ask("/completion", {"prompt": prompt, "n_predict": 0, "cache_prompt": True, "id_slot": 0})

    def slot(self, action: str, name: str = "") -> dict[str, Any]:
        return self.ask(f"/slots/0?action={action}", {"filename": name})

    def continuation(self, prompt: list[int]) -> tuple[list[int], list[float], int]:
        """Tokens and their log probabilities, and how many tokens of the prompt were computed."""
        wanted = {"prompt": prompt, "n_predict": CONTINUATION, "cache_prompt": True, "id_slot": 0, "temperature": 0}
        found = self.ask("/completion", {**wanted, "return_tokens": True, "n_probs": 1})
        chances = [step["logprob"] for step in found["completion_probabilities"]]
        return found["tokens"], chances, found["timings"]["prompt_n"]


@contextmanager
def server(model: Path, slots: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "tools.mount_llama", "--serve", str(model), f"{slots}/"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        try:
            address = child.stdout.readline().strip()
            assert address, "the server did not start"
            yield Server(address)
        finally:
            child.kill()


@contextmanager
def mounted(store: Path, where: Path, *, kill: bool) -> Iterator[Path]:
    command = [sys.executable, "-m", "kvfs.cli.main"]
    reading, writing = os.pipe()
    serving = [*command, "-C", str(store), "mount", str(where), "--ready-fd", str(writing)]
    with subprocess.Popen(serving, pass_fds=[writing], start_new_session=True) as child, open(reading, "rb") as ready:
        os.close(writing)
        assert ready.read(1) == b"1", "the mount did not start"
        try:
            yield where / "files"
        finally:
            if kill:
                child.send_signal(signal.SIGKILL)
            subprocess.run([*command, "umount", "--lazy", str(where)], check=True, stdout=subprocess.DEVNULL)


def prompt(number: int) -> list[int]:
    """The system prompt, then 200 to 1,000 tokens of this conversation."""

    def words(seed: int, count: int) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(WORDS_FIRST, WORDS_END) for _ in range(count)]

    return [1, *words(0, SYSTEM_TOKENS - 1), *words(number + 1, random.Random(-number - 1).randrange(200, 1_000))]


class Watch:
    """The most that the segments of a store ever took, seen every few milliseconds."""

    def __init__(self, store: Path) -> None:
        self._folders = [store / "segments", store / "doomed"]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most = 0

    def now(self) -> int:
        total = 0
        for folder in self._folders:
            for file in folder.glob("*"):
                try:
                    total += file.stat().st_blocks * 512
                except FileNotFoundError:
                    continue
        return total

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            self.most = max(self.most, self.now())

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


def save(llama: Server, first: int, count: int) -> dict[int, tuple[list[int], list[float], int]]:
    """Save conversations; what each of them continues with."""
    found = {}
    for number in range(first, first + count):
        llama.prefill(prompt(number))
        llama.slot("save", f"{number}.bin")
        found[number] = llama.continuation(prompt(number))
    return found


def differing(llama: Server, expected: dict[int, tuple[list[int], list[float], int]]) -> list[int]:
    """The conversations that do not continue as they did. Each is restored into an empty slot."""
    wrong = []
    for number, before in expected.items():
        llama.slot("erase")
        llama.slot("restore", f"{number}.bin")
        if llama.continuation(prompt(number)) != before:  # equal numbers of computed tokens: nothing was computed again
            wrong.append(number)
    return wrong


def run(base: Path, limit_mib: int, kill: bool) -> bool:
    model, store, where = base / "model.gguf", base / "store", base / "mnt"
    where.mkdir()
    make_model(model)
    kvfs.open(store, capacity=f"{limit_mib}MiB").close()
    watch = Watch(store)
    with mounted(store, where, kill=kill) as files, server(model, files) as llama:
        expected = save(llama, 0, CONVERSATIONS)
        plain = sum(file.stat().st_size for file in files.iterdir())
    stored = watch.now()
    print(
        f"{CONVERSATIONS} conversations: {plain / MIB:.1f} MiB of files are {stored / MIB:.1f} MiB of segments, ",
        end="",
    )
    print(f"a ratio of {plain / stored:.2f}; {len({tuple(e[0]) for e in expected.values()})} different continuations")
    with mounted(store, where, kill=kill) as files, server(model, files) as llama:
        wrong = differing(llama, expected)
        computed = sorted({before[2] for before in expected.values()})
        print(f"after a restart of both: {CONVERSATIONS - len(wrong)} of {CONVERSATIONS} continue as before, ", end="")
        print(f"{computed} tokens of the prompt computed")
        with watch:
            later = save(llama, CONVERSATIONS, MORE)
        left = {n: before for n, before in {**expected, **later}.items() if (files / f"{n}.bin").exists()}
        wrong += differing(llama, left)
        print(
            f"while {MORE} more were saved: at most {watch.most / MIB:.1f} MiB of {limit_mib} MiB; {len(left)} of ",
            end="",
        )
        print(f"{CONVERSATIONS + MORE} are left, the oldest number {min(left)}; {len(wrong)} continue otherwise")
    with kvfs.open(store) as opened:
        sound = opened.wait_ready() and opened.verify().ok
        print(f"kvfs verify: {'no problem' if sound else 'problems'}")
    return not wrong and sound and watch.most <= limit_mib * MIB and len(left) > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", help="where to make the store and the model; default: the temporary directory")
    parser.add_argument("--limit-mib", type=int, default=128, help="capacity of the store")
    parser.add_argument("--kill", action="store_true", help="end the mounts with SIGKILL")
    parser.add_argument("--serve", nargs=2, metavar=("MODEL", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        ok = run(Path(folder), arguments.limit_mib, arguments.kill)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()

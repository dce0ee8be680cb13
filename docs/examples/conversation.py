"""A conversation: each turn finds what the turn before has stored, and stores what it added. Needs numpy.

python docs/examples/conversation.py [DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile

import numpy

import kvfs

LAYERS, HEADS, DIM, ORDER = 4, 2, 64, "layer,kv,head,token,dim"
LAYOUT = kvfs.PageLayout.kv(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype=numpy.float16)


def computed(tokens: list[int], restored: int) -> numpy.ndarray:
    """What a model computes for the tokens from ``restored`` on; here numbers that depend on the token."""
    kv = numpy.zeros((LAYERS, 2, HEADS, len(tokens), DIM), numpy.float16)
    kv[:, :, :, restored:, :] = numpy.array(tokens[restored:], numpy.float16)[:, None] / 1000
    return kv


def turn(ns: kvfs.Namespace, tokens: list[int]) -> tuple[int, numpy.ndarray]:
    """(tokens that were restored, KV of all tokens)."""
    with ns.match(tokens, leave=1) as match:
        pages = bytearray(match.nbytes)
        restored = ns.get(match, pages) * LAYOUT.page_tokens
    kv = computed(tokens, restored)
    if restored:
        kvfs.unpack(LAYOUT, memoryview(pages)[: restored // LAYOUT.page_tokens * LAYOUT.page_bytes], kv, ORDER)
    ns.put(tokens, kvfs.pack(LAYOUT, kv, ORDER))  # pages that are stored already are skipped
    return restored, kv


def main(directory: str) -> None:
    tokens = list(range(400))  # the system prompt
    with kvfs.open(directory, capacity="64MiB") as store:
        ns = store.namespace("my-model", LAYOUT, revision="9213176")
        for number in range(1, 5):
            tokens = tokens + [1000 + number] * 100
            restored, kv = turn(ns, tokens)
            assert (kv == computed(tokens, 0)).all()
            print(f"turn {number}: {restored} of {len(tokens)} tokens restored")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(f"{folder}/store")

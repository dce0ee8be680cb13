"""An engine's own buffers in an event loop: saves and loads in the background, awaited. Needs numpy.

python docs/examples/async_loads.py [DIRECTORY]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile

import numpy

import kvfs

BLOCK, BLOCKS = 16, 64
LAYOUT = kvfs.PageLayout.kv(layers=4, kv_heads=2, head_dim=64, dtype=numpy.float16, page_tokens=BLOCK)


async def request(ns: kvfs.Namespace, io: kvfs.HostIO, tokens: list[int], blocks: list[int]) -> str:
    """Restore what is stored of a prompt into the engine's blocks, and save the rest."""
    with ns.match(tokens, leave=1) as match:
        loaded = await io.load(match, blocks)
    # ... the engine computes the tokens from loaded.tokens on ...
    saved = await io.save(ns.plan_save(tokens), blocks)
    return f"{loaded.tokens} tokens restored, {saved.pages} pages saved"


async def serve(ns: kvfs.Namespace, io: kvfs.HostIO) -> None:
    prompts = [[*range(n * 1000, n * 1000 + 200)] for n in range(4)]
    per = -(-200 // BLOCK)
    for round_ in ("first", "second"):
        answers = await asyncio.gather(
            *(request(ns, io, p, list(range(i * per, (i + 1) * per))) for i, p in enumerate(prompts))
        )
        for number, answer in enumerate(answers):
            print(f"{round_} time, prompt {number}: {answer}")


def main(directory: str) -> None:
    kv = numpy.zeros((4, BLOCKS, 2, BLOCK, 2, 64), numpy.float16)  # layer, block, K and V, token, head, number
    with kvfs.open(directory, capacity="64MiB") as store:
        ns = store.namespace("my-model", LAYOUT, revision="9213176")
        with ns.attach(kvfs.describe(LAYOUT.groups[0], kv, "layer,block,kv,token,head,dim"), ring_bytes="8MiB") as io:
            asyncio.run(serve(ns, io))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(f"{folder}/store")

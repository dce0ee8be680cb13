"""How long the calls of SGLang's linker take its scheduler: ``python -m tools.benchmarks.linker_calls``.

Prompts of 32k tokens are offloaded, looked up and loaded on the simulated device of the tests, whose kernels do nothing
here, in the order in which SGLang makes these calls. Events stand for CUDA's: their calls give the interpreter up for
an instant. In every other round the engine makes such calls of its own in between, which are timed as well: so long
another thread keeps the interpreter from it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tools.benchmarks.calls import Watch, give_way, use_simulated_device

TURNS = 20  # calls of the engine's own after each call of the linker
SECONDS = 60.0


class Event:
    """torch.cuda.Event: of the past."""

    def record(self, stream: Any = None) -> None:
        give_way()

    def query(self) -> bool:
        give_way()
        return True

    def synchronize(self) -> None:
        give_way()


class Engine:
    """SGLang's scheduler, as far as a linker sees it."""

    def __init__(self, path: Path, page: int, tokens: int, layers: int) -> None:
        import torch

        from tests.integrations import sglang_api

        sglang_api.install()
        torch.cuda.Event = Event  # type: ignore[assignment, misc]
        from kvfs.integrations.sglang.linker import KvfsLinker
        from tests.integrations.sglang_pools import MHATokenToKVPool

        self.api, self.pages, self.watch = sglang_api, tokens // page, Watch()
        self.busy = False  # whether the engine makes calls of its own
        pool = MHATokenToKVPool(page_size=page, pages=2 * self.pages, layers=layers, heads=1, dim=8)
        params = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool), page_size=page, tp_cache_group=None,
            attn_tp_cache_group=None, pp_rank=0, pp_size=1, mtp_draft_device_pools=(), sidecar_draft_device_pools=(),
        )  # fmt: skip
        self.linker = KvfsLinker(
            SimpleNamespace(served_model_name="bench"), params, components={sglang_api.ComponentType.FULL},
            extra_config={"path": str(path), "capacity": "8GiB", "weights_id": "0123abcd"}, forward_stream=object(),
        )  # fmt: skip
        self.linker._on_gpu = True
        slots = torch.arange(page, page + 2 * self.pages * page)
        self.source, self.target = slots[: self.pages * page], slots[self.pages * page :]

    def call(self, name: str, *given: Any, of: str = "") -> Any:
        """``of``: what the times are of, where those of other calls of the method are kept apart."""
        found = self.watch.time(f"{name}{of}", getattr(self.linker, name), *given)
        for _ in range(TURNS if self.busy else 0):
            self.watch.time("a call of the engine's own", give_way)
        return found

    def transfers(self, keys: list[str], slots: Any) -> list[Any]:
        return [self.api.PoolTransfer(name=self.api.PoolName.KV, keys=keys, device_indices=slots)]

    def round(self, number: int) -> None:
        """One prompt, from the miss to the end of its load."""
        self.busy = bool(number % 2)
        keys = [hashlib.sha256(b"%d %d" % (number, n)).hexdigest() for n in range(self.pages)]
        assert self.call("lookup", "r", self.transfers(keys, None), of=", nothing stored") == []
        assert self.call("offload", self.transfers(keys, self.source))
        self.poll(lambda: bool(self.call("num_completed_offloads")))
        assert self.call("pop_completed_offload"), "the prompt is not stored"
        found = self.call("lookup", "r", self.transfers(keys, None), of=", all stored")
        assert len(found) == self.pages, f"{len(found)} of {self.pages} pages are found"
        assert self.call("load", "r", self.transfers(keys, self.target))
        index = self.call("start_layer_wise_loading")
        layers = self.linker.layer_done_counter.futures[index]

        def loaded() -> bool:
            self.call("num_completed_offloads")
            return all(layer.done() for layer in layers)

        self.poll(loaded)
        assert self.call("finish_layer_wise_loading", index), "the prompt is not loaded"

    def poll(self, done: Any) -> None:
        end = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < end, "it goes on without end"
            time.sleep(0.001)


def measure(folder: Path, page: int, tokens: int, layers: int, rounds: int) -> Watch:
    engine = Engine(folder / "store", page, tokens // page * page, layers)
    for number in range(rounds):
        engine.round(number)
    engine.linker.close()
    return engine.watch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--store", type=Path, default=None, help="where the store is made; default: temporary files")
    args = parser.parse_args()
    use_simulated_device(append_elsewhere=True)
    print(
        f"{args.tokens} tokens, pages of {args.page}, {args.rounds} rounds, load average {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} CPUs"
    )
    with tempfile.TemporaryDirectory(dir=args.store) as folder:
        measure(Path(folder), args.page, args.tokens, args.layers, args.rounds).report()
    return 0


if __name__ == "__main__":
    sys.exit(main())

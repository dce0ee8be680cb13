"""What calls of an adapter take its engine's thread: times by name, on the simulated device of the tests."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

MS = 1e3
_short_call = ctypes.CDLL(None).getppid  # gives the interpreter up for an instant, as most calls of torch do


class Watch:
    """Wall and CPU time of calls, by name."""

    def __init__(self) -> None:
        self._wall, self._cpu = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)

    def time(self, name: str, call: Callable[..., Any], *given: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        found = call(*given)
        self._wall[name].append((time.perf_counter() - wall) * MS)
        self._cpu[name].append((time.thread_time() - cpu) * MS)
        return found

    def rows(self) -> dict[str, tuple[list[float], list[float]]]:
        """Milliseconds of wall and CPU time of each call, by name."""
        return {name: (wall, self._cpu[name]) for name, wall in self._wall.items()}

    def report(self) -> None:
        for name, (wall, cpu) in self.rows().items():
            print(f"{name:26} {len(wall):6} calls, ms: wall {summary(wall)}; CPU {summary(cpu)}")


def summary(times: list[float]) -> str:
    p99 = sorted(times)[int(0.99 * len(times))]
    return f"min {min(times):.3f}, median {statistics.median(times):.3f}, p99 {p99:.3f}, max {max(times):.3f}"


def give_way() -> None:
    """What an engine does all the time: a call that gives the interpreter up, and needs it again."""
    _short_call()


def use_simulated_device(*, append_elsewhere: bool = False) -> None:
    """Have ``Namespace.attach`` attach to the simulated device of the tests, whose kernels do nothing from now on."""
    import torch

    from kvfs.namespace import Namespace
    from tests.gpu.simulated import SimulatedDevice, SimulatedStream
    from tests.gpu.test_gpu_io import attach

    device = SimulatedDevice()

    def attached(space: Namespace, kv: Any, *, queue_max: int = 256, **_: Any) -> Any:
        return attach(
            space, kv, device=device, ring_bytes="64MiB", scratch_bytes="64MiB", queue_max=queue_max,
            append_elsewhere=append_elsewhere,
        )  # fmt: skip

    Namespace.attach = attached  # type: ignore[method-assign, assignment]
    for kernel in ("_move", "_sum"):
        setattr(SimulatedStream, kernel, lambda *_, **__: None)
    torch.set_num_threads(1)

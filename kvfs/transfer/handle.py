"""Transfer: the caller's handle of one asynchronous save or load."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from functools import partial
from typing import Any

from kvfs.transfer.control import Latch, TransferControl
from kvfs.types import TransferResult, TransferState


class Transfer:
    """Handle of one save or load. Any thread may use it. It can wait and cancel; only the workers settle and end."""

    def __init__(self, control: TransferControl) -> None:
        self._control = control
        self.kind = control.task.kind
        #: the engine may reuse its units: this transfer reads, or writes, no byte of them any more
        self.source_free: Latch = control.source_free
        #: all that will be stored is visible to other processes; for loads the same as ``done``
        self.published: Latch = control.published
        #: the result is there, and every callback has returned
        self.done: Latch = control.done
        if control.task.on_done is not None:
            control.call_last(partial(control.task.on_done, self))

    @property
    def state(self) -> TransferState:
        """Where it is now; ``TransferState`` lists the states."""
        return self._control.state

    @property
    def result(self) -> TransferResult | None:
        """None until the end."""
        return self._control.result

    @property
    def error(self) -> BaseException | None:
        """What a failed transfer failed with."""
        return self._control.error

    def layer_ready(self, layer: int) -> Latch:
        """When MODEL layer ``layer`` may be used. Set at the end in any case: look at ``result`` then.

        Layers become ready in order, each once all pages of it have been verified and copied; the host transport,
        and loads that are not layer-wise, load whole pages: then all layers of a group become ready together.
        """
        return self._control.layer_ready(layer)

    def wait(self, timeout: float | None = None) -> TransferResult | None:
        """Wait for the end; the result, or None if it has not come within ``timeout`` seconds."""
        return self.result if self.done.wait(timeout) else None

    def __await__(self) -> Generator[Any, None, TransferResult]:
        """``await transfer`` in a coroutine: its result, without a thread that waits. Cancelling the task leaves the
        transfer as it is."""
        return self._ended().__await__()

    async def _ended(self) -> TransferResult:
        import asyncio

        self.done.check_process()
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def wake() -> None:
            if not ended.done():
                ended.set_result(None)

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: no coroutine waits
                loop.call_soon_threadsafe(wake)

        self._control.when_done(tell)
        await ended
        assert self.result is not None, "a transfer that is done has a result"
        return self.result

    def cancel(self, timeout: float | None = None) -> bool:
        """Stop. True: no byte of this transfer, in the engine or in the store, can move any more.

        Waits for the copy or append in progress, on a GPU also for the read. False if that takes longer than
        ``timeout`` seconds (the cancellation stands, and its end will follow). Callbacks may still be running in
        another thread until ``done``. Harmless when the transfer has ended.
        """
        return self._control.cancel(timeout)

    def withdraw(self, timeout: float) -> bool:
        """``cancel`` for a caller that needs the engine's memory only. True: no byte of it can move any more.

        What moves between disk and ring may take as long as it likes; the transfer ends with it. False after
        ``timeout`` seconds, as in ``cancel``.
        """
        return self._control.withdraw(timeout)

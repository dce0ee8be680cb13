"""Transfer: the caller's handle of one asynchronous save or load."""

from __future__ import annotations

from functools import partial

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

    def cancel(self, timeout: float | None = None) -> bool:
        """Stop. True: no byte of this transfer, in the engine or in the store, can move any more.

        Waits for the copy, read or append in progress; False if that takes longer than ``timeout`` seconds (the
        cancellation stands, and its end will follow). Callbacks may still be running in another thread until
        ``done``. Harmless when the transfer has ended.
        """
        return self._control.cancel(timeout)

    def withdraw(self, timeout: float) -> bool:
        """``cancel`` for a caller that needs the engine's memory only. True: no byte of it can move any more.

        What moves between disk and ring may take as long as it likes; the transfer ends with it. False after
        ``timeout`` seconds, as in ``cancel``.
        """
        return self._control.withdraw(timeout)

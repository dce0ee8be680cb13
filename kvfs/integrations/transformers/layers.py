"""The supported layers of a cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvfs.pages.layout import Group


class RecordingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A window layer that gives attention its window, and keeps the history for ``PrefixCache.save``.

    In earlier releases of transformers 5, its recording (``activate_past_recording``) shows attention more than
    the window, unless ``crop`` follows each forward pass.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self.record_past = True  # tells crop() that there is a history

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add [batch, head, n, dim]. Returns what those n tokens may attend to: themselves and w - 1 tokens before."""
        if not self.is_initialized:
            super().update(key_states[:, :, :0], value_states[:, :, :0])  # no tokens: dtype and device only
        tokens = key_states.shape[-2]
        self.cumulative_length += tokens
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        visible = self.sliding_window - 1 + tokens
        return self.keys[:, :, -visible:], self.values[:, :, -visible:]


def fits(layer: Any, group: Group, *, strict: bool = False) -> bool:
    """Whether ``layer`` of a cache holds KV of ``group``. Unless ``strict``, it may hold more than a window."""
    if type(layer) in (DynamicSlidingWindowLayer, RecordingLayer):
        return bool(group.need.kind == "window" and layer.sliding_window == group.need.window)
    return type(layer) is DynamicLayer and (group.need.kind == "all" or not strict)

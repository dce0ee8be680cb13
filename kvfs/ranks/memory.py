"""The pools of a rank as others open them: allocations by handles, buffers by offsets in these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvfs.errors import ConfigError
from kvfs.gpu.device import Device, Memory
from kvfs.gpu.gpu_io import GpuPools
from kvfs.kernels.driver import IPC_BYTES, CudaError
from kvfs.kernels.moves import Tiles, moves_of
from kvfs.kernels.unit_table import sums_in_units, unit_table
from kvfs.kernels.work_list import Shape, shape_of
from kvfs.native.shared_prefixes import Page
from kvfs.pages.device_kv import DeviceKV, KVBuffer
from kvfs.pages.layout import PageLayout
from kvfs.ranks.geometry import page_in
from kvfs.transfer.workers import Attached

ALLOCATIONS_MAX = 4096


def describe(device: Device, attached: Iterable[Attached]) -> dict[str, Any]:
    """What a peer needs to open these buffers, for JSON. CudaError if their memory has no handles."""
    allocations: dict[int, tuple[int, bytes, int]] = {}  # by start: number, handle, bytes
    groups: dict[str, Any] = {}
    for a in attached:
        buffers = []
        for b in a.device.buffers:
            bases = []
            for base in b.bases:
                found = next((s for s, (_, _, n) in allocations.items() if s <= base < s + n), None)
                if found is None:
                    handle, found, nbytes = device.export(base)
                    allocations[found] = (len(allocations), handle, nbytes)
                bases.append([allocations[found][0], base - found])
            buffers.append([
                bases, list(b.layers), list(b.heads), list(b.replica), b.unit_tokens, b.units, list(b.stride),
                list(b.cell),
            ])  # fmt: skip
        groups[a.group.name] = buffers
    handles = [[handle.hex(), nbytes] for _, handle, nbytes in allocations.values()]
    return {"allocations": handles, "buffers": groups}


class MovesHere(NamedTuple):
    """A table of moves (``kvfs.kernels.moves``) on this device, and the launches for it."""

    table: Memory
    tiles: tuple[Tiles, ...]


class PeerGroup(NamedTuple):
    """One group in the memory of a peer, as this device sees it."""

    units: int
    shape: Shape
    table: Memory  # unit table of the shape, on this device
    page: Page  # what an entry of the peer must hold
    whole: MovesHere  # into the units of this rank, of granules of which all states move, and of others
    some: MovesHere


def peer_group(pools: GpuPools, a: Attached, device: DeviceKV) -> PeerGroup:
    """``device``: the buffers of group ``a`` at the peer, at addresses of this device."""
    shape, own = shape_of(a.group, a.part, device), pools.shapes[a.number]
    if not sums_in_units(shape):
        raise ConfigError(f"a peer keeps group {a.group.name} in {shape.buffers} buffers, too many to sum")
    moves = [moves_of(shape, own, some=some) for some in (False, True)]
    return PeerGroup(
        device.units, shape, pools.upload(unit_table(shape)), page_in(a.group, a.part, device.unit_tokens),
        *(MovesHere(pools.upload(table), tiles) for table, tiles in moves),
    )  # fmt: skip


class PeerMemory:
    """The pools of a peer, mapped on this device until ``close``. Call it and ``close`` with the device entered.

    ConfigError if the description does not fit the layout and the parts of this rank; CudaError if the device does
    not reach the peer's.
    """

    def __init__(self, pools: GpuPools, text: Mapping[str, Any]) -> None:
        self._device = pools.device
        self._opened: list[int] = []
        self.groups: dict[str, PeerGroup] = {}
        try:
            allocations = [self._open(*one) for one in _allocations(text)]
            for name, a in pools.attached.items():
                self.groups[name] = peer_group(pools, a, _device_kv(a, text, allocations, pools.layout))
        except BaseException as exc:
            self.close()
            if isinstance(exc, (LookupError, TypeError, ValueError)) and not isinstance(exc, ConfigError):
                raise ConfigError(f"the description of a peer's memory is wrong ({exc})") from None
            raise

    def _open(self, handle: bytes, nbytes: int) -> tuple[int, int]:
        start, there = self._device.open_peer(handle)
        self._opened.append(start)
        if there < nbytes:
            raise ConfigError(f"a peer names an allocation of {nbytes} bytes, it has {there}")
        return start, there

    def close(self) -> None:
        """No copy out of it may be under way."""
        while self._opened:
            try:
                self._device.close_peer(self._opened.pop())
            except CudaError:  # the driver is shutting down, or the device has failed: nothing is left to release
                continue


def _allocations(text: Mapping[str, Any]) -> list[tuple[bytes, int]]:
    given = text["allocations"]
    if len(given) > ALLOCATIONS_MAX:
        raise ValueError("too many allocations")
    found = [(bytes.fromhex(handle), int(nbytes)) for handle, nbytes in given]
    if any(len(handle) != IPC_BYTES or nbytes <= 0 for handle, nbytes in found):
        raise ValueError("a handle of the wrong size")
    return found


def _device_kv(
    a: Attached, text: Mapping[str, Any], allocations: list[tuple[int, int]], layout: PageLayout
) -> DeviceKV:
    """The peer's buffers of a group, checked: every address is inside the allocations that were opened."""
    buffers = []
    for bases, layers, heads, replica, unit_tokens, units, stride, cell in text["buffers"][a.group.name]:
        places = [(allocations[number], offset) for number, offset in bases]
        if any(not 0 <= offset < nbytes for (_, nbytes), offset in places):
            raise ValueError("a buffer begins outside its allocation")
        buffers.append(KVBuffer(
            a.device.memory, tuple(start + offset for (start, _), offset in places),
            tuple(extent for extent, _ in places), tuple(layers), tuple(heads), tuple(replica), unit_tokens, units,
            tuple(stride), tuple(cell),
        ))  # fmt: skip
    device = DeviceKV(a.group.name, tuple(buffers))
    group = device.check(layout)
    if device.part(group) != a.part:
        raise ConfigError(f"a peer holds {device.part(group)} of group {group.name}, this rank {a.part}")
    return device

"""Golden stores: archives of stores, which every later version must be able to read.

``python -m tools.golden make FILE`` writes the store of the present format to a .tar.xz; the archive of each format is
committed once, below ``tests/golden``, and not made again after a release. ``CASES`` lists its content; the bytes of a
page follow from its name alone. A later version may add cases for its own format; those of format 1 never change.

The index is left out: it belongs to one directory on one machine, and every store can rebuild it.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import random
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

import kvfs
from kvfs import Cell, Group, Need, PageLayout, Part
from kvfs.eviction.evictor import RELOCATED
from kvfs.format.segment import FLAG_CARRIED
from kvfs.system.files import Files
from kvfs.write.active_segments import SegmentClass

BORN_US = 1_700_000_000_000_000  # November 2023: the clock under which the store is made
TTL = 3600
PINNED = "a system prompt"
FILES = ("super", "kvfs.toml", "gate", "main", "CACHEDIR.TAG", "README.txt")


@dataclass(frozen=True)
class Case:
    """One prompt (or list of keys) in one namespace."""

    name: str
    layout: PageLayout
    chunks: int
    fork: int | None = None  # from this chunk on, another prompt of the same beginning
    salt: str = ""
    identity: dict[str, Any] = field(default_factory=dict)
    extra: dict[int, bytes] | None = None
    parts: tuple[Part, ...] = ()  # written one by one; empty: whole pages
    ttl: int | None = None
    codec: str | None = None

    @property
    def tokens(self) -> list[int]:
        """Token ids; those of a forked case begin like the case without the fork."""
        step, found = self.layout.page_tokens, []
        for chunk in range(self.chunks):
            branch = "" if self.fork is None or chunk < self.fork else f" fork {self.fork}"
            found += random.Random(f"{self.name}{branch} {chunk}").choices(range(1 << 32), k=step)
        return found

    @property
    def keys(self) -> list[bytes]:
        """Opaque keys."""
        return [f"{self.name} {chunk}".encode() for chunk in range(self.chunks)]

    def page(self, group: Group, chunk: int) -> bytes:
        """A page: 32 bytes that follow from its name, eight times, then the next 32."""
        branch = "" if self.fork is None or chunk < self.fork else f" fork {self.fork}"
        seed = f"{self.name}{branch} {group.name} {chunk}".encode()
        return b"".join(
            hashlib.sha256(seed + i.to_bytes(4, "little")).digest() * 8 for i in range(-(-group.page_bytes // 256))
        )[: group.page_bytes]

    def pages(self) -> dict[str, bytes]:
        return {g.name: b"".join(self.page(g, c) for c in range(self.chunks)) for g in self.layout.groups}

    def part_of(self, pages: bytes, part: Part) -> bytes:
        """A rectangle of each page of the only group, from the definition of the order: granule, layer, head."""
        (group,) = self.layout.groups
        step, out = group.granule_states * group.cell.nbytes, []
        for at in range(0, len(pages), group.page_bytes):
            for granule in range(group.granules):
                for layer in range(part.layer, part.layer + part.layers):
                    row = (granule * len(group.layers) + layer) * group.heads + part.head
                    out.append(pages[at + row * step :][: part.heads * step])
        return b"".join(out)

    def namespace(self, store: kvfs.Store) -> kvfs.Namespace:
        revision = hashlib.sha256(b"golden weights").hexdigest()
        return store.namespace(
            f"golden/{self.name}", self.layout, revision, self.salt, codec=self.codec, **self.identity
        )


GQA = PageLayout.kv(layers=2, kv_heads=2, head_dim=16, dtype="bfloat16", page_tokens=16)
HYBRID = PageLayout.of(
    [
        Group("full", (0, 2), 2, Cell("bf16 k8+v8", 32), Need.all(), 16),
        Group("window", (1,), 2, Cell("bf16 k8+v8", 32), Need.window_of(48), 16),
        Group("state", (3,), 1, Cell("ssm f32 96", 384), Need.exact(), 1),
    ],
    16,
)
#: Stored in this order.
CASES = (
    Case("gqa", GQA, 80),  # more records than one table holds
    Case("gqa", GQA, 12, fork=5),
    Case("mla", PageLayout.mla(layers=3, kv_lora_rank=64, rope_dim=16, dtype="bfloat16", page_tokens=16), 10),
    Case(
        "int8", PageLayout.kv(layers=2, kv_heads=2, head_dim=16, dtype="int8", scale="float32", page_tokens=32), 6,
        identity={"rope": {"theta": 500000.0, "scaling": None}, "adapter": "sha256:0123", "epoch": 3},
    ),
    Case("tp2", GQA, 8, parts=(Part(0, 1, 0, 2), Part(1, 1, 0, 2))),
    Case("pp2", GQA, 3, parts=(Part(0, 2, 0, 1), Part(0, 2, 1, 1))),
    Case("hybrid", HYBRID, 9),
    Case("keys", PageLayout.opaque(1500, 16), 7),
    Case("tenant", GQA, 4, salt="correct horse battery staple"),
    Case("images", GQA, 5, extra={1: b"an image", 3: b"another"}),
    Case("carried", GQA, 6),
    Case("pinned", GQA, 9),
    Case("expired", GQA, 5, ttl=TTL),
    Case("last", GQA, 12),  # in the segment that stays active
)  # fmt: skip


WIDE = PageLayout.kv(
    layers=4, kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=16
)  # a page of one block stays raw
BYTES = PageLayout.kv(layers=4, kv_heads=2, head_dim=64, dtype="float8_e4m3fn", scale_digest="unit", page_tokens=16)
#: Of the archive with codecs; one namespace has pages of all codecs.
CODEC_CASES = (
    Case("raw", WIDE, 4, codec="raw"),
    Case("zstd", WIDE, 4, codec="zstd"),
    Case("planes", WIDE, 4, codec="planes"),
    Case("fp8", BYTES, 4, codec="planes"),
    Case("keys", PageLayout.opaque(20000, 16), 4, codec="planes"),
    Case("odd", PageLayout.opaque(12289, 16), 3, codec="zstd"),
    Case("ranks", WIDE, 4, parts=(Part(0, 1, 0, 4), Part(1, 1, 0, 4)), codec="planes"),
    Case("mixed", WIDE, 2, codec="raw"),
    Case("mixed", WIDE, 5, codec="zstd"),
    Case("mixed", WIDE, 9, codec="planes"),
)


class StillFiles(Files):
    """A clock that advances one microsecond per call, and random numbers from a seed."""

    def __init__(self) -> None:
        self._random, self._lock, self._now = random.Random(1), threading.Lock(), BORN_US

    def random(self, nbytes: int) -> bytes:
        with self._lock:
            return self._random.randbytes(nbytes)

    def now_us(self) -> int:
        with self._lock:
            self._now += 1
            return self._now


def put(store: kvfs.Store, case: Case) -> None:
    """Store a case; everything of it must be stored."""
    ns, pages = case.namespace(store), case.pages()
    (first, *others) = pages.values()
    if case.layout.kind == "opaque":
        results = [ns.put_keys(case.keys, first)]
    elif case.parts:
        results = [ns.put(case.tokens, case.part_of(first, part), part=part) for part in case.parts]
    else:
        results = [ns.put(case.tokens, pages if others else first, extra=case.extra, ttl=case.ttl)]
    assert all(r.declined == r.in_flight == 0 for r in results), results


def get(store: kvfs.Store, case: Case, part: Part | None = None) -> Iterator[tuple[str, int, bytes]]:
    """(group, first chunk, bytes) of what is restored."""
    ns = case.namespace(store)
    opaque = case.layout.kind == "opaque"
    match = ns.match_keys(case.keys) if opaque else ns.match(case.tokens, extra=case.extra, part=part)
    with match:
        outs = {g.name: bytearray(g.nbytes) for g in match.groups}
        chunks = ns.get(match, outs if len(outs) > 1 else next(iter(outs.values())))
        assert chunks == match.chunks, f"{case.name}: {chunks} of {match.chunks} chunks verified"
        for g in match.groups:
            yield g.name, g.first, bytes(outs[g.name])


def make_store(path: Path) -> None:
    """All cases, in sealed segments, one of pinned pages, one of relocated pages, and an active one."""
    with kvfs.open(path, capacity="16MiB", segment_bytes="512KiB", index_bytes="2MiB", files=StillFiles()) as store:
        assert store.wait_ready()
        for case in CASES:
            put(store, case)
            if case.name == "pinned":
                store.pin(PINNED, case.namespace(store), case.tokens)
            elif case.name == "carried":
                _relocate(store, case)
        states = store.stats()["segments"]
        assert states["sealed"] >= 2 and states["active"] >= 1, states


def make_codec_store(path: Path) -> None:
    """All cases with codecs."""
    with kvfs.open(path, capacity="16MiB", segment_bytes="512KiB", index_bytes="2MiB", files=StillFiles()) as store:
        assert store.wait_ready()
        for case in CODEC_CASES:
            put(store, case)


def _relocate(store: kvfs.Store, case: Case) -> None:
    """Copy a case's pages as eviction does."""
    core = store._shared
    with case.namespace(store).match(case.tokens) as match:
        target = SegmentClass(bytes(8) + RELOCATED, FLAG_CARRIED, evictor=True)
        copied = core.services().evictor.relocator.copy_match(target, match, set(match.segments), lambda _: None)
        assert copied == case.chunks
        core.services().active.finish(target)


def pack(path: Path) -> bytes:
    """A store as .tar.xz, without machine-specific files, in stable order, without owners and times."""
    buffer = io.BytesIO()
    names = [*FILES, *(f"{d}/{n}" for d in ("segments", "pins") for n in sorted(os.listdir(path / d)))]
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in names:
            data = (path / name).read_bytes()
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o600
            tar.addfile(info, io.BytesIO(data))
    return lzma.compress(buffer.getvalue(), preset=9)


def unpack(archive: Path, path: Path) -> None:
    """Make a store directory of an archive."""
    path.mkdir(mode=0o700)
    for name in ("index", "segments", "doomed", "run", "run/use", "pins", "import", "quarantine"):
        (path / name).mkdir(mode=0o700)
    with lzma.open(archive) as plain, tarfile.open(fileobj=plain) as tar:
        for info in tar:
            source = tar.extractfile(info)
            assert source is not None and ".." not in info.name
            (path / info.name).write_bytes(source.read())
            (path / info.name).chmod(0o600)


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument("file", type=click.Path(dir_okay=False, exists=False, path_type=Path))
@click.option("--codecs", is_flag=True, help="The store whose pages are encoded.")
def make(file: Path, codecs: bool) -> None:
    """Write the golden store of the present format to FILE, which must not exist."""
    if file.exists():
        raise click.ClickException(f"{file} exists: golden stores are made once")
    with tempfile.TemporaryDirectory() as folder:
        (make_codec_store if codecs else make_store)(Path(folder) / "store")
        data = pack(Path(folder) / "store")
    file.write_bytes(data)
    click.echo(f"{file}: {len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    main(prog_name="python -m tools.golden")

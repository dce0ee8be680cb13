"""A store whose pages are put in any codec, recompressed, moved in bundles and rebuilt: nothing changes."""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import kvfs
from kvfs.format import codec
from tests.format.test_codec import LAYOUT, PAGE, bf16
from tests.stores import restored, seeded, tokens_of

CHUNKS_MAX = 6
PROMPTS = st.integers(0, 5)
NAMES = st.sampled_from(sorted(codec.CODECS))


@cache
def pages_of(prompt: int) -> bytes:
    """Numbers, noise and zeros, differently mixed in each prompt."""
    kinds = (bf16(prompt, PAGE), seeded(prompt, PAGE), bytes(PAGE - 1) + bytes([prompt]))
    return b"".join(kinds[(prompt + chunk * (prompt % 3)) % 3] for chunk in range(CHUNKS_MAX))


class CodecMachine(RuleBasedStateMachine):
    """The store is large enough that all that was put stays."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvfs-codecs-", dir="/dev/shm"))
        self.path = self.folder / "store"
        self.stored: dict[int, int] = {}
        self.open()

    def open(self) -> None:
        self.store = kvfs.open(self.path, capacity="64MiB", segment_bytes="256KiB")
        assert self.store.wait_ready()

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(prompt=PROMPTS, chunks=st.integers(1, CHUNKS_MAX), name=NAMES)
    def put(self, prompt: int, chunks: int, name: str) -> None:
        ns = self.store.namespace("model", LAYOUT, "1", codec=name)
        result = ns.put(tokens_of(prompt, chunks), pages_of(prompt)[: chunks * PAGE])
        assert result.declined == 0
        assert result.stored == max(0, chunks - self.stored.get(prompt, 0))
        self.stored[prompt] = max(chunks, self.stored.get(prompt, 0))

    @rule(name=st.sampled_from(["zstd", "planes"]), seal=st.booleans())
    def recompress(self, name: str, seal: bool) -> None:
        if seal:
            self.store._shared.services().active.finish_all()
        before = self.store.stats()["used_bytes"]
        assert self.store.recompress(name, idle=0).stopped == ""
        assert self.store.stats()["used_bytes"] <= before + 2 * self.store.settings.segment_bytes

    @rule(lose_index=st.booleans())
    def reopen(self, lose_index: bool) -> None:
        self.store.close()
        if lose_index:
            os.unlink(self.path / "index" / "CURRENT")
        self.open()

    @rule()
    def move_by_bundle(self) -> None:
        if not self.stored:
            return
        self.store.export(str(self.folder / "bundle"), ["model"])
        with kvfs.open(self.folder / "other", capacity="64MiB", segment_bytes="256KiB") as other:
            report = other.import_bundle(str(self.folder / "bundle"))
            assert report.stored == sum(self.stored.values())
        self.store.close()
        shutil.rmtree(self.path)
        (self.folder / "other").rename(self.path)
        self.open()

    @invariant()
    def every_page_is_there(self) -> None:
        ns = self.store.namespace("model", LAYOUT, "1")
        for prompt, chunks in self.stored.items():
            assert restored(ns, tokens_of(prompt, CHUNKS_MAX)) == pages_of(prompt)[: chunks * PAGE]
            with ns.match(tokens_of(prompt, CHUNKS_MAX)) as match:
                assert b"".join(ns.view(match)) == pages_of(prompt)[: chunks * PAGE]

    @rule()
    def verify(self) -> None:
        report = self.store.verify()
        assert report.ok and report.index_pages == sum(self.stored.values()), report.problems
        pages = sum(info.pages for info in self.store.catalog.namespaces())
        assert pages == sum(self.stored.values())


TestCodecs = CodecMachine.TestCase
TestCodecs.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)

"""State machines: a whole store, and transfers of an engine, each against a model of dictionaries.

The index alone and the staging ring have theirs in ``tests/index/test_rows.py`` and ``tests/transfer/test_staging.py``.
``HYPOTHESIS_PROFILE=explore`` looks for new runs.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvfs
from kvfs import PageOutcome, TransferState
from kvfs.system.files import Files
from tools.torture.case import PAGE_BYTES, PROMPTS, allocated_bytes, namespace, open_store
from tools.torture.faults import lose_index

SIZES = {"max_examples": 1000} if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else {"max_examples": 25}
BASE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
FAMILIES = st.integers(0, 4)
CHUNKS = st.integers(1, 8) | st.integers(30, 36)
FORKS = st.sampled_from([None, None, 2, 5, 31])


class LaterFiles(Files):
    """A clock that the machine advances."""

    later_us = 0

    def now_us(self) -> int:
        return super().now_us() + self.later_us


class StoreMachine(RuleBasedStateMachine):
    """put, match, get, view, evict, pin, expire, damage, reopen, crash.

    The name of a page is its content, which is a function of all tokens up to its end. ``sure`` must be served,
    ``ever`` were put at some time: nothing else may be.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvfs-machine-", dir=BASE))
        self.path = self.folder / "store"
        self.files = LaterFiles()
        self.sure: dict[bytes, int] = {}  # page -> when it expires (us; 0: never)
        self.ever: set[bytes] = set()
        self.pins: dict[str, list[bytes]] = {}
        self.open()

    def open(self) -> None:
        self.store = open_store(self.path, self.files)
        assert self.store.wait_ready(30.0)
        self.ns = namespace(self.store)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def live(self, page: bytes) -> bool:
        expires = self.sure.get(page)
        return expires is not None and (not expires or self.files.now_us() < expires)

    @rule(family=FAMILIES, chunks=CHUNKS, fork=FORKS, ttl=st.sampled_from([None, None, None, 60]))
    def put(self, family: int, chunks: int, fork: int | None, ttl: int | None) -> None:
        tokens = PROMPTS.tokens(family, chunks, fork)
        pages = PROMPTS.pages(tokens)
        new = [page for page in pages if not self.live(page)]
        result = self.ns.put(tokens, b"".join(pages), ttl=ttl)
        assert result.stored + result.skipped + result.declined + result.in_flight == chunks
        assert (result.declined, result.in_flight) == (0, 0), result
        assert result.stored <= len(new)
        self.ever |= set(pages)
        for page in new:  # what was there already keeps its time; two seconds less: expiry counts whole ones
            self.sure[page] = self.files.now_us() + (ttl - 2) * 1_000_000 if ttl else 0

    @rule(family=FAMILIES, chunks=CHUNKS, fork=FORKS, view=st.booleans())
    def get(self, family: int, chunks: int, fork: int | None, view: bool) -> None:
        tokens = PROMPTS.tokens(family, chunks, fork)
        pages = PROMPTS.pages(tokens)
        must = next((i for i, page in enumerate(pages) if not self.live(page)), chunks)
        with self.ns.match(tokens) as match:
            if view:
                found = [bytes(v) for v in self.ns.view(match)]
            else:
                out = bytearray(match.nbytes)
                n = self.ns.get(match, out)
                found = [bytes(out[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]) for i in range(n)]
        assert found == pages[: len(found)]
        assert len(found) >= must, f"{len(found)} of {must} pages"
        assert set(found) <= self.ever

    @rule(name=st.sampled_from(["a", "b"]), family=FAMILIES, chunks=st.integers(1, 8))
    def pin(self, name: str, family: int, chunks: int) -> None:
        tokens = PROMPTS.tokens(family, chunks)
        pages = PROMPTS.pages(tokens)
        if not all(self.sure.get(page) == 0 for page in pages):
            return  # pages that may expire at any moment do not test pins
        assert self.store.pin(name, self.ns, tokens) == len(tokens)
        self.pins[name] = pages

    @rule(name=st.sampled_from(["a", "b"]))
    def unpin(self, name: str) -> None:
        assert self.store.unpin(name) == (self.pins.pop(name, None) is not None)

    @rule(limit=st.sampled_from([0, 0, 300_000, None]))
    def gc(self, limit: int | None) -> None:
        self.store.gc(limit)
        if limit is not None:
            pinned = {page for pages in self.pins.values() for page in pages}
            self.sure = {page: at for page, at in self.sure.items() if page in pinned}

    @rule(seconds=st.sampled_from([1, 30, 61]))
    def time_passes(self, seconds: int) -> None:
        self.files.later_us += seconds * 1_000_000

    @rule(crash=st.booleans())
    def reopen(self, crash: bool) -> None:
        self.store.close()
        if crash:
            lose_index(self.path)
        self.open()

    @precondition(lambda self: bool(self.sure))
    @rule(which=st.integers(0, 1 << 30))
    def damage(self, which: int) -> None:
        """A byte of one page changes on the disk, in every copy of it."""
        page = sorted(self.sure)[which % len(self.sure)]
        for file in (self.path / "segments").iterdir():
            with contextlib.suppress(FileNotFoundError), file.open("r+b") as opened:  # reclaimed in the background
                data = opened.read()
                if (at := data.find(page)) >= 0:
                    opened.seek(at + which % PAGE_BYTES)
                    opened.write(bytes([data[at + which % PAGE_BYTES] ^ 1]))
        del self.sure[page]

    @rule(repair=st.booleans())
    def verify(self, repair: bool) -> None:
        report = self.store.verify(repair=repair)
        assert not report.index_errors and not report.bad_segments, report.problems

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.store._shared.c.index.read(lambda s: s.check_ledger(), 10.0)
        used = sum(allocated_bytes(self.path / d) for d in ("segments", "doomed"))
        assert used <= self.store.settings.segments_bytes_max
        assert not [name for name in self.store.stats()["counters"] if name.endswith("_crashed")]


TestStore = StoreMachine.TestCase
TestStore.settings = settings(stateful_step_count=25, **SIZES)  # type: ignore[arg-type]

T, BLOCK, UNITS = 16, 16, 48
LAYOUT = kvfs.PageLayout.kv(layers=2, kv_heads=2, head_dim=4, dtype="bfloat16", page_tokens=T)
PROMPT_CHUNKS = 6
WAIT_SECONDS = 60.0


class TransferMachine(RuleBasedStateMachine):
    """Saves and loads of an engine in host memory, cancelled at any time, several at once, a small ring.

    Prompt p is in units [6p, 6p + 6) while it is saved. A load goes to poisoned units of its own: what it reports as
    loaded must be there, and nothing else may have changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvfs-machine-", dir=BASE))
        self.store = kvfs.open(self.folder / "store", capacity="16MiB")
        self.ns = self.store.namespace("m", LAYOUT, revision="r1")
        self.source = np.random.default_rng(1).integers(0, 65536, (2, UNITS, BLOCK, 2, 8), dtype="uint16")
        self.target = np.full_like(self.source, 0xA5A5)
        order = "layer,block,token,head,2*dim"
        group = LAYOUT.groups[0]
        ring = 3 * 4096
        self.out = self.ns.attach(kvfs.describe(group, self.source, order), ring_bytes=ring)
        self.back = self.ns.attach(kvfs.describe(group, self.target, order), ring_bytes=ring)
        self.saves: list[tuple[int, int, kvfs.Transfer]] = []
        self.loads: dict[int, tuple[kvfs.Transfer, list[int]]] = {}
        self.stored: dict[int, int] = {}  # prompt -> leading chunks that were published

    def teardown(self) -> None:
        for _, _, transfer in self.saves:
            assert transfer.wait(WAIT_SECONDS) is not None
        for number in list(self.loads):
            self.end_of_load(number)
        for io in (self.out, self.back):
            io.close()
            io.ring.check()
            assert io.ring.free == io.ring.slots
        self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @staticmethod
    def tokens(prompt: int, chunks: int) -> list[int]:
        return [prompt * 1000 + i for i in range(chunks * T)]

    @initialize()
    def poison(self) -> None:
        assert (self.target == 0xA5A5).all()

    @rule(prompt=st.integers(0, 7), chunks=st.integers(1, PROMPT_CHUNKS))
    def save(self, prompt: int, chunks: int) -> None:
        plan = self.ns.plan_save(self.tokens(prompt, chunks))
        units = [prompt * PROMPT_CHUNKS + i for i in range(chunks)]
        self.saves.append((prompt, chunks, self.out.save(plan, units, deadline=WAIT_SECONDS)))

    @precondition(lambda self: bool(self.saves))
    @rule(which=st.integers(0, 100), cancel=st.booleans())
    def end_of_save(self, which: int, cancel: bool) -> None:
        prompt, chunks, transfer = self.saves.pop(which % len(self.saves))
        if cancel:
            assert transfer.cancel(WAIT_SECONDS)
        result = transfer.wait(WAIT_SECONDS)
        assert result is not None and transfer.state is not TransferState.FAILED, transfer.error
        if result.declined == 0 and not cancel:
            self.stored[prompt] = max(chunks, self.stored.get(prompt, 0))

    @rule(prompt=st.integers(0, 7), chunks=st.integers(1, PROMPT_CHUNKS))
    def load(self, prompt: int, chunks: int) -> None:
        if prompt in self.loads:
            return
        match = self.ns.match(self.tokens(prompt, chunks))
        if not self.saves:
            assert match.chunks >= min(chunks, self.stored.get(prompt, 0))
        units = [prompt * PROMPT_CHUNKS + i for i in range(PROMPT_CHUNKS)]
        done: list[int] = []

        def note(page: kvfs.PageDone) -> None:
            if page.outcome is PageOutcome.LOADED:
                done.append(page.chunk)

        self.loads[prompt] = (self.back.load(match, units, on_page=note, deadline=WAIT_SECONDS), done)

    @precondition(lambda self: bool(self.loads))
    @rule(which=st.integers(0, 100))
    def cancel_load(self, which: int) -> None:
        number = sorted(self.loads)[which % len(self.loads)]
        assert self.loads[number][0].cancel(WAIT_SECONDS)
        self.end_of_load(number)

    @precondition(lambda self: bool(self.loads))
    @rule(which=st.integers(0, 100))
    def wait_for_load(self, which: int) -> None:
        self.end_of_load(sorted(self.loads)[which % len(self.loads)])

    def end_of_load(self, number: int) -> None:
        """Loaded pages hold the saved bytes; the others still hold the poison, once no byte moves any more."""
        transfer, done = self.loads.pop(number)
        result = transfer.wait(WAIT_SECONDS)
        assert result is not None and transfer.state is not TransferState.FAILED, transfer.error
        assert len(set(done)) == len(done) and result.tokens <= len(done) * T
        assert set(range(result.tokens // T)) <= set(done)
        for chunk in range(PROMPT_CHUNKS):
            unit = number * PROMPT_CHUNKS + chunk
            if chunk in done:
                assert (self.target[:, unit] == self.source[:, unit]).all()
            else:
                assert (self.target[:, unit] == 0xA5A5).all(), "a page was copied that was not reported"
            self.target[:, unit] = 0xA5A5

    @rule(seed=st.integers(0, 100))
    def forget(self, seed: int) -> None:
        """Eviction while transfers run."""
        if random.Random(seed).random() < 0.2:
            self.store.gc(target_bytes=0)
            self.stored.clear()


TestTransfers = TransferMachine.TestCase
TestTransfers.settings = settings(stateful_step_count=25, **SIZES)  # type: ignore[arg-type]

"""What every adapter of an engine must do, as tests that an adapter's own test class inherits.

A subclass says how an engine with the adapter is started (``start``); the engine shows a few calls (``Engine``). The
tests then store and load prompts across restarts, damage and failing disks. Each is a plain function with assertions,
which pytest collects from the subclass; ``memory_path``, a directory for one test, is a fixture of the caller.
"""

from __future__ import annotations

import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kvfs.system.files import Files
from kvfs.testing.faulty_files import Fault, FaultyFiles

PAGES = 40  # of a prompt: more than one row of the index
DAMAGED = 64  # bytes


class Engine(Protocol):
    """An engine with its adapter, as the tests use it. No call raises because of a disk."""

    def put(self, tokens: Sequence[int], pages: Sequence[bytes], first: int = 0) -> int:
        """Make ``pages`` the KV of the prompt's pages from ``first`` on, in the engine's memory, and have them stored.

        Canonical bytes; how many leading ones the engine takes for stored.
        """

    def lookup(self, tokens: Sequence[int]) -> int:
        """How many leading pages of the prompt the engine would load."""

    def get(self, tokens: Sequence[int], count: int) -> list[bytes | None]:
        """Load the first ``count`` pages into memory that was overwritten, and return them.

        None where the engine does not use a page: its memory must be as it was.
        """

    def counters(self) -> Mapping[str, int]:
        """The counters of its store."""

    def close(self) -> None: ...


class EngineContract(ABC):
    """The tests. ``page_tokens`` and ``page_bytes`` are of the engine that ``start`` makes."""

    page_tokens: int
    page_bytes: int
    #: whether the engine gives up all pages of a load of which one is lost, instead of those from there on
    gives_up_loads = False

    @abstractmethod
    def start(self, path: Path, files: Files | None = None) -> Engine:
        """A new engine on the store at ``path``, made if there is none; ``files`` is passed to ``kvfs.open``."""

    # -- helpers -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def engine(self, path: Path, files: Files | None = None) -> Iterator[Engine]:
        engine = self.start(path, files)
        try:
            yield engine
        finally:
            engine.close()

    def prompt(self, seed: int, pages: int = PAGES) -> tuple[list[int], list[bytes]]:
        """Token ids of whole pages, and the content of each."""
        draw = random.Random(seed)
        return draw.choices(range(32_000), k=pages * self.page_tokens), [
            draw.randbytes(self.page_bytes) for _ in range(pages)
        ]

    # -- what is stored is found -------------------------------------------------------------

    def test_a_prompt_is_found_after_a_restart(self, memory_path: Path) -> None:
        tokens, pages = self.prompt(1)
        with self.engine(memory_path / "store") as engine:
            assert engine.lookup(tokens) == 0
            assert engine.put(tokens, pages) == PAGES
        with self.engine(memory_path / "store") as engine:
            assert engine.lookup(tokens) == PAGES
            assert engine.get(tokens, PAGES) == pages

    def test_another_prompt_is_found_as_far_as_it_is_the_same(self, memory_path: Path) -> None:
        tokens, pages = self.prompt(2)
        with self.engine(memory_path / "store") as engine:
            engine.put(tokens, pages)
            at = 35 * self.page_tokens + 3
            other = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
            assert engine.lookup(other) == 35
            assert engine.get(other, 35) == pages[:35]
            assert engine.lookup(tokens[self.page_tokens :]) == 0, "a page is of its whole prefix"

    def test_a_prompt_that_grows_is_found_as_a_whole(self, memory_path: Path) -> None:
        tokens, pages = self.prompt(3)
        with self.engine(memory_path / "store") as engine:
            for first, end in ((0, 5), (5, 33), (33, PAGES)):
                assert engine.put(tokens[: end * self.page_tokens], pages[first:end], first) == end - first
        with self.engine(memory_path / "store") as engine:
            assert engine.lookup(tokens) == PAGES and engine.get(tokens, PAGES) == pages

    def test_a_second_put_moves_no_byte(self, memory_path: Path) -> None:
        tokens, pages = self.prompt(4)
        with self.engine(memory_path / "store") as engine:
            engine.put(tokens, pages)
            before = dict(engine.counters())
            assert engine.put(tokens, pages) == PAGES
            after = engine.counters()
            for name in ("bytes_written", "pages_stored", "saves_done"):
                assert after.get(name, 0) == before.get(name, 0), name

    def test_loaded_tokens_are_counted_by_the_tier_they_came_from(self, memory_path: Path) -> None:
        tokens, pages = self.prompt(7)
        with self.engine(memory_path / "store") as engine:
            engine.put(tokens, pages)
            assert engine.get(tokens, PAGES) == pages
            names = ("tokens_loaded", "tokens_loaded_host", "tokens_loaded_disk")
            loaded, host, disk = (engine.counters().get(name, 0) for name in names)
            assert host + disk == loaded == PAGES * self.page_tokens

    # -- what is not right is not served -----------------------------------------------------

    def test_a_damaged_page_is_refused_and_can_be_stored_again(self, memory_path: Path) -> None:
        tokens, pages = self.prompt(5)
        with self.engine(memory_path / "store") as engine:
            engine.put(tokens, pages)
        _damage(memory_path / "store", pages[33])
        with self.engine(memory_path / "store") as engine:
            found = engine.get(tokens, PAGES)
            assert found[33] is None and (self.gives_up_loads or found[:33] == pages[:33])
            assert all(got in (None, page) for got, page in zip(found, pages, strict=True))
            assert engine.lookup(tokens) == 33, "the next lookup is shorter"
            engine.put(tokens, pages[33:], 33)
            assert engine.lookup(tokens) == PAGES and engine.get(tokens, PAGES) == pages

    def test_a_disk_that_fails_makes_misses(self, memory_path: Path) -> None:
        tokens, pages = self.prompt(6)
        files = FaultyFiles()
        with self.engine(memory_path / "store", files) as engine:
            files.arm(Fault(kind="pwritev", persistent=True))
            assert engine.put(tokens, pages) < PAGES
            files.arm()
            again, content = self.prompt(7)
            assert engine.put(again, content) == PAGES, "a later prompt is stored"
        with self.engine(memory_path / "store", files) as engine:
            files.arm(Fault(kind="preadv", persistent=True))
            assert all(got in (None, page) for got, page in zip(engine.get(again, PAGES), content, strict=True))
            files.arm()

    def test_a_disabled_store_stores_and_finds_nothing(self, memory_path: Path, monkeypatch: _Environment) -> None:
        monkeypatch.setenv("KVFS_DISABLE", "1")
        tokens, pages = self.prompt(8, 3)
        with self.engine(memory_path / "store") as engine:
            assert engine.put(tokens, pages) == engine.lookup(tokens) == 0

    def test_an_engine_is_closed_twice(self, memory_path: Path) -> None:
        engine = self.start(memory_path / "store")
        engine.close()
        engine.close()


class _Environment(Protocol):
    def setenv(self, name: str, value: str) -> None: ...


def _damage(path: Path, page: bytes) -> None:
    """Zero some bytes of a stored page."""
    for file in sorted((path / "segments").glob("*.kvs")):
        at = file.read_bytes().find(page)
        if at >= 0:
            with file.open("r+b") as opened:
                opened.seek(at + len(page) // 2)
                opened.write(bytes(DAMAGED))
            return
    raise AssertionError("no segment has the page that was stored")

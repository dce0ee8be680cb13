"""The order of writes to the disk and to the ledger: one test for each rule that a planted bug once broke unnoticed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.directory.root import Directory, create
from kvfs.errors import IndexUnavailableError
from kvfs.format import segment as fmt
from kvfs.index.gate import Gate
from kvfs.index.row_updates import RunKeys, claim_run
from kvfs.index.rows import CLAIM_SECONDS
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, SegmentRow
from kvfs.system.files import Files
from kvfs.testing import Fault, FaultyFiles
from tests.stores import segment_files
from tools.torture.case import PAGE_BYTES, PROMPTS, allocated_bytes, get, namespace, open_store, put
from tools.torture.faults import lose_index
from tools.torture.images import DictTxn
from tools.torture.judge import Judge
from tools.torture.parsers import DB


@pytest.fixture
def judge() -> Iterator[Judge]:
    found = Judge()
    yield found
    assert not found.failed, "\n".join([found.line(), *found.notes])


class Log(Files):
    """Files that logs its changes, with the name of the file, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []

    def note(self, kind: str, name: str, at: int = 0) -> None:
        self.events.append((kind, name, at))

    def _name(self, fd: int) -> str:
        return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        done = super().pwritev(fd, buffers, offset)
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        self.note("direct write" if direct else "write", self._name(fd), offset)
        return done

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self.note("sync", self._name(fd))

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self.note("sync", self._name(fd))

    def rename(self, src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        super().rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self.note("rename", f"{src} -> {dst}")

    def unlink(self, name: str, *, dir_fd: int) -> None:
        super().unlink(name, dir_fd=dir_fd)
        self.note("unlink", name)


def log_commits(store: kvfs.Store, files: Log) -> None:
    index, write = store._shared.c.index, store._shared.c.index.write

    def logged(function: Callable[[Session], Any], timeout: float) -> Any:
        result = write(function, timeout)
        files.note("commit", "")
        return result

    index.write = logged  # type: ignore[method-assign]


def test_a_store_exists_when_its_name_is_durable(tmp_path: Path) -> None:
    """super is synced, gets its name, then the directory is synced: ``open`` returns only after that."""
    files = Log()
    create(str(tmp_path / "store"), b"capacity = 16777216\n", files)
    last = [(kind, name.split(".")[1] if name.startswith(".") else name) for kind, name, _ in files.events[-4:]]
    assert last == [("write", "super"), ("sync", "super"), ("unlink", "super"), ("sync", "store")]


@pytest.mark.parametrize("name", ["state", "CURRENT"])
def test_a_small_file_is_synced_before_it_gets_its_name(tmp_path: Path, name: str) -> None:
    files = Log()
    open_store(tmp_path / "store", files).close()
    kinds = [(kind, text) for kind, text, _ in files.events]
    renames = [i for i, (kind, text) in enumerate(kinds) if kind == "rename" and text.endswith(f" -> {name}")]
    assert renames
    for at in renames:
        temporary = kinds[at][1].partition(" -> ")[0]
        before = [kind for kind, text in kinds[:at] if text == temporary]
        assert before == ["write", "sync"], before
        assert kinds[at + 1][0] == "sync", "the directory is not synced"


def test_purge_marks_are_on_the_disk_before_a_row_changes(tmp_path: Path, judge: Judge) -> None:
    """A rebuild after a power cut would bring the pages back: marks, then their folder, then those of the segments."""
    files = Log()
    with open_store(tmp_path / "store", files) as store:
        for family in (1, 2):
            put(namespace(store), PROMPTS.tokens(family, 3), judge)
        store._shared.background.stop()
        store._shared.services().active.finish_all()
        log_commits(store, files)
        files.events.clear()
        assert store.purge(namespace(store), prefix=PROMPTS.tokens(1, 3)).pages == 3
        events = [(kind, name) for kind, name, _ in files.events]
    [mark, settled] = [i for i, (kind, name) in enumerate(events) if kind == "rename"]
    assert [kind for kind, name in events[:mark] if name == events[mark][1].partition(" -> ")[0]] == ["write", "sync"]
    first = events.index(("commit", ""))
    assert events[mark + 1 : first] == [("sync", name) for name in ("purged", "segments", "doomed", "store")]
    assert settled > first, "a mark says that it is pending until no row names what is purged"


def test_a_purged_segment_is_gone_from_the_disk_before_its_mark(tmp_path: Path, judge: Judge) -> None:
    """A power cut may bring the file back: it must find its mark."""
    files = Log()
    with open_store(tmp_path / "store", files) as store:
        put(namespace(store), PROMPTS.tokens(1, 3), judge)
        store._shared.background.stop()
        (segment,) = [file.name for file in segment_files(tmp_path / "store")]
        files.events.clear()
        assert store.purge(namespace(store)).segments_dropped == 1
        events = [(kind, name) for kind, name, _ in files.events]
    steps = [("unlink", segment), ("sync", "doomed"), ("unlink", segment.removesuffix(".kvs"))]
    last = len(events) - 1 - events[::-1].index(("sync", "doomed"))
    assert [event for event in events if event in steps and event != ("sync", "doomed")] == [steps[0], steps[2]]
    assert events.index(steps[0]) < last < events.index(steps[2])


@pytest.mark.parametrize("mode", ["cache", "staging"])
@pytest.mark.parametrize("sync", ["cache", "sync"])
def test_payloads_then_entries_then_the_sync_then_the_commit(
    disk_path: Path, judge: Judge, sync: str, mode: str
) -> None:
    files = Log()
    with open_store(disk_path / "store", files, sync=sync, mode=mode) as store:
        put(namespace(store), PROMPTS.tokens(1, 3), judge)
        log_commits(store, files)
        files.events.clear()
        put(namespace(store), PROMPTS.tokens(2, 3), judge)
        of_segment = [e for e in files.events if e[0] == "commit" or e[1].endswith(".kvs")]
        assert get(namespace(store), PROMPTS.tokens(2, 3), judge) == 3
    steps = [
        kind if kind in ("commit", "sync") else
        "entries" if at < fmt.FIRST_PAYLOAD else "direct payload" if kind == "direct write" else "payload"
        for kind, _, at in of_segment
    ]  # fmt: skip
    written = ["payload"] if mode == "cache" else ["direct payload", "payload"]  # and then leaf tables
    assert steps == ["commit", *written, "entries", *(["sync"] if sync == "sync" else []), "commit"]


@pytest.mark.parametrize(("sync", "syncs"), [("cache", set()), ("batch", {"sync"}), ("sync", {"sync"})])
def test_what_a_seal_covers_is_on_the_disk_before_the_seal(
    tmp_path: Path, judge: Judge, sync: str, syncs: set[str]
) -> None:
    """A rebuild trusts sealed segments."""
    files = Log()
    with open_store(tmp_path / "store", files, sync=sync) as store:
        put(namespace(store), PROMPTS.tokens(1, 3), judge)
        files.events.clear()
        store._shared.services().appender._active.finish_all()
    events = [(kind, at) for kind, name, at in files.events if name.endswith(".kvs")]
    [seal] = [i for i, (kind, at) in enumerate(events) if kind == "write" and at >= fmt.FIRST_PAYLOAD]
    for around in (events[:seal], events[seal + 1 :]):  # at level batch, a background task may sync in addition
        assert {kind for kind, _ in around} == syncs


@pytest.mark.parametrize("mode", ["cache", "staging"])
def test_a_failed_sync_is_not_retried(disk_path: Path, judge: Judge, mode: str) -> None:
    """The kernel marks lost pages clean: the segment is dropped."""
    files = FaultyFiles()
    with open_store(disk_path / "store", files, sync="sync", mode=mode) as store:
        ns = namespace(store)
        files.arm(Fault(files.calls["fdatasync"] + 1, "fdatasync", error=errno.EIO))
        before = files.calls["fdatasync"]
        result = put(ns, PROMPTS.tokens(1, 4), judge)
        assert result is not None and result.declined == 4
        assert files.calls["fdatasync"] == before + 1
        assert get(ns, PROMPTS.tokens(1, 4), judge) == 0
        assert store.stats()["segments"]["sealed"] + store.stats()["segments"]["active"] == 0


@pytest.mark.parametrize("mode", ["cache", "staging"])
def test_a_short_write_is_continued(disk_path: Path, judge: Judge, mode: str) -> None:
    files = FaultyFiles()
    with open_store(disk_path / "store", files, mode=mode) as store:
        ns = namespace(store)
        for family in range(6):  # payloads, entries: each write of a put in turn
            files.arm(Fault(files.calls["pwritev"] + 1 + family % 3, "pwritev", "short"))
            put(ns, PROMPTS.tokens(family, 9), judge)
            files.arm()
            assert get(ns, PROMPTS.tokens(family, 9), judge) == 9
        assert store.verify().ok


def test_the_end_of_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    with (tmp_path / "short").open("rb") as file:
        assert Files().read(file.fileno(), 3, 0) == b"abc"
        for offset in (1, 3, 4):
            with pytest.raises(OSError, match="short"):
                Files().read(file.fileno(), 3, offset)


@pytest.mark.parametrize("mode", ["cache", "staging"])
def test_the_capacity_is_reserved_before_a_file_grows(
    memory_path: Path, disk_path: Path, judge: Judge, mode: str
) -> None:
    path = (memory_path if mode == "cache" else disk_path) / "store"
    with open_store(path, capacity="16MiB", mode=mode) as store:
        ns, limit = namespace(store), store.settings.segments_bytes_max
        for family in range(80):
            put(ns, PROMPTS.tokens(family, 60), judge)
            held = sum(allocated_bytes(path / d) for d in ("segments", "doomed"))
            assert held <= limit
        assert store.stats()["counters"]["segments_evicted"] > 0
        assert limit < 80 * 60 * PAGE_BYTES


def test_the_index_is_marked_dirty_before_it_changes(tmp_path: Path, judge: Judge) -> None:
    path = tmp_path / "store"
    for _ in range(2):  # a new store; one that was closed cleanly
        with open_store(path) as store:
            assert json.loads((path / "state").read_bytes())["clean"] is False
            put(namespace(store), PROMPTS.tokens(1, 3), judge)
        assert json.loads((path / "state").read_bytes())["clean"] is True


def test_tables_are_chained_where_they_are_full(tmp_path: Path, judge: Judge) -> None:
    """Segments of more records than a table holds, read back from their own tables."""
    path = tmp_path / "store"
    settings = {"segment_bytes": "1MiB"}
    with open_store(path, **settings) as store:
        for chunks in (74, 75, 1, 1, 1, 40):  # the first table ends between and within appends
            put(namespace(store), PROMPTS.tokens(chunks, chunks), judge)
    lose_index(path)
    with open_store(path) as store:
        assert store.wait_ready()
        for chunks in (74, 75, 40):
            assert get(namespace(store), PROMPTS.tokens(chunks, chunks), judge) == chunks
        report = store.verify()
        assert report.ok and report.pages >= 74 + 75 + 40 + 1


def test_a_trimmed_segment_holds_all_that_was_published(tmp_path: Path, judge: Judge) -> None:
    """Payloads, and the leaf tables behind them."""
    path = tmp_path / "store"
    with open_store(path) as store:
        put(namespace(store), PROMPTS.tokens(1, 5), judge)
    for index_lost in (False, True):
        if index_lost:
            lose_index(path)
        with open_store(path) as store:
            assert store.wait_ready()
            report = store.verify()
            assert report.ok and report.pages == 5, report.problems


def test_a_segment_that_is_held_stays_charged(tmp_path: Path, judge: Judge) -> None:
    with open_store(tmp_path / "store") as store:
        ns = namespace(store)
        for family in range(4):
            put(ns, PROMPTS.tokens(family, 40), judge)
        with ns.match(PROMPTS.tokens(0, 40)) as match:
            held = sum(f.stat().st_blocks * 512 for f in segment_files(tmp_path / "store") if _in(f, match.segments))
            store.gc(target_bytes=0)
            assert store.stats()["used_bytes"] >= held > 0
        store.gc(target_bytes=0)
        assert store.stats()["segments"]["dropped"] == 0


def _in(file: Path, segments: dict[int, bytes]) -> bool:
    return bytes.fromhex(file.stem) in segments.values()


def test_a_claim_expires() -> None:
    now_s = 1_000_000
    session = Session(DictTxn(), DB, "", now_s)
    number = session.add_segment(SegmentRow(bytes(16), b"o" * 16, bytes(16), ACTIVE, 0, 1, 0, 4096, 0, 0, 0))
    ends = [now_s - 1, now_s, now_s + 1, now_s + CLAIM_SECONDS, now_s + CLAIM_SECONDS + 1, 2**32 - 1]
    assert [session.claimed_until(number, end) for end in ends] == [False, False, True, True, False, False]


def test_a_claim_of_another_writer_is_in_flight() -> None:
    """The chunk is neither stored twice nor called present: its writer may still die."""
    session = Session(DictTxn(), DB, "", 1_000_000)
    row = SegmentRow(bytes(16), b"o" * 16, bytes(16), ACTIVE, 0, 1, 0, 4096, 0, 0, 0)
    mine, others = session.add_segment(row), session.add_segment(row._replace(segment_id=b"i" * 16))
    run = RunKeys(0, [bytes([n]) * 32 for n in range(6)], lambda chunk_hash: chunk_hash + bytes(8), 4)
    assert len(claim_run(session, run, [1, 2], others).targets) == 2
    claims = claim_run(session, run, range(6), mine)
    assert ([t.slot for t in claims.targets], claims.skipped, claims.in_flight) == ([0, 3, 4, 5], 0, 2)
    session.now_s += CLAIM_SECONDS
    assert len(claim_run(session, run, [1, 2], mine).targets) == 2


class SteppingFiles(Files):
    """Time passes only in ``sleep``."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.mark.parametrize("name", ["gate", "main"])
def test_the_wait_for_a_lock_ends_at_the_deadline(tmp_path: Path, name: str) -> None:
    open_store(tmp_path / "store").close()
    files = SteppingFiles()
    directory = Directory(str(tmp_path / "store"), files, read_only=False)
    gate = Gate(directory)
    with (tmp_path / "store" / name).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for exclusive in (False, True):
            start = files.seconds
            with pytest.raises(IndexUnavailableError, match="timeout"):
                gate.acquire(exclusive=exclusive, deadline=start + 0.02)
            assert 0.02 <= files.seconds - start < 0.03
    gate.acquire(exclusive=True, deadline=files.seconds)  # the failed try has left no lock
    gate.release()
    gate.close()
    directory.close()


def test_the_newest_of_two_records_wins_a_rebuild(tmp_path: Path) -> None:
    """A segment that was lost and found again brings back no record that was replaced meanwhile."""
    path, tokens = tmp_path / "store", PROMPTS.tokens(1, 3)
    aside = tmp_path / "aside.kvs"
    old, new = (bytes([n]) * (3 * PAGE_BYTES) for n in (1, 2))
    with open_store(path) as store:
        namespace(store).put(tokens, old)
    (segment,) = segment_files(path)
    segment.rename(aside)
    lose_index(path)
    with open_store(path) as store:
        assert store.wait_ready()
        assert namespace(store).put(tokens, new).stored == 3
    shutil.copy(aside, segment)
    lose_index(path)
    with open_store(path) as store:
        assert store.wait_ready()
        out = bytearray(3 * PAGE_BYTES)
        with namespace(store).match(tokens) as match:
            assert namespace(store).get(match, out) == 3
        assert out == new


class LaterFiles(Files):
    """A clock that can be advanced."""

    later_us = 0

    def now_us(self) -> int:
        return super().now_us() + self.later_us


def test_what_has_expired_is_a_miss_before_it_is_collected(tmp_path: Path) -> None:
    files, tokens = LaterFiles(), PROMPTS.tokens(1, 3)
    with open_store(tmp_path / "store", files) as store:
        ns = namespace(store)
        ns.put(tokens, b"".join(PROMPTS.pages(tokens)), ttl=300)
        files.later_us = 200_000_000
        assert ns.match(tokens).chunks == 3
        files.later_us = 301_000_000
        assert ns.match(tokens).chunks == 0

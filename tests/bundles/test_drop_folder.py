"""The drop folder: complete bundles are adopted once, by one process; anything else is moved aside or left alone."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kvfs
from kvfs.bundles import drop_folder
from kvfs.bundles.drop_folder import REFUSED_MAX, SETTLE_SECONDS, STALE_SECONDS, DropFolder
from kvfs.bundles.importer import Importer, Pace
from kvfs.directory.watch import DROPS
from kvfs.errors import NoSpaceError
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, counters, restored, run_child, seeded, tiny, tokens_of

SEEDS, CHUNKS = 4, 40


class Clock(Files):
    """Real time, which a test can advance."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of four prompts."""
    with kvfs.open(tmp_path / "source", capacity="32MiB") as store:
        ns = store.namespace("alpha", tiny(), "1a")
        for seed in range(SEEDS):
            assert ns.put(tokens_of(seed, CHUNKS), seeded(seed, CHUNKS * TINY_BYTES)).stored == CHUNKS
        store.export(str(tmp_path / "b.tar"), ["alpha"])
    return tmp_path / "b.tar"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(store_path: Path, clock: Clock) -> Iterator[kvfs.Store]:
    """A store whose drop folder is examined only when a test does it."""
    with kvfs.open(store_path, capacity="64MiB", files=clock) as made:
        by_hand(made)
        yield made


def by_hand(store: kvfs.Store) -> None:
    background = store._shared.background
    background._tasks = [c for c in background._tasks if c.name != DROPS]


def folder(store: kvfs.Store) -> Path:
    return Path(store.path) / "import"


def refused(store: kvfs.Store) -> dict[str, str]:
    """Name -> reason of what was moved aside."""
    aside = folder(store) / "refused"
    names = sorted(os.listdir(aside)) if aside.is_dir() else []
    return {n: (aside / f"{n}.reason").read_text() for n in names if not n.endswith(".reason")}


def look(store: kvfs.Store) -> None:
    """One call of ``look``, and the import that it starts."""
    drops: DropFolder = store._shared.services().drops
    drops.look()
    drops.join()
    assert drops._thread is None or not drops._thread.is_alive()


def settle(store: kvfs.Store, clock: Clock, seconds: float = SETTLE_SECONDS) -> None:
    look(store)
    clock.ahead += seconds
    look(store)


def drop(store: kvfs.Store, bundle: Path, name: str = "b.tar") -> Path:
    """Rename a bundle into the folder, as `mv` and `kvfs export` do: it is complete."""
    there = folder(store) / name
    os.rename(bundle, there)
    store._shared.services().drops.arrived(name)
    return there


def serves(store: kvfs.Store) -> bool:
    ns = store.namespace("alpha", tiny(), "1a")
    return all(restored(ns, tokens_of(s, CHUNKS)) == seeded(s, CHUNKS * TINY_BYTES) for s in range(SEEDS))


def empty(store: kvfs.Store) -> bool:
    return store.catalog.namespaces() == []


def test_a_bundle_is_adopted_and_removed(store: kvfs.Store, bundle: Path) -> None:
    there = drop(store, bundle)
    look(store)
    assert serves(store) and not there.exists() and refused(store) == {}
    assert counters(store)["bundles_adopted"] == 1 and store.verify().ok


@pytest.mark.parametrize("renamed", [True, False])
def test_only_bundles_with_the_signature_that_the_store_requires_are_adopted(
    store: kvfs.Store, bundle: Path, clock: Clock, tmp_path: Path, renamed: bool
) -> None:
    for name in ("key", "other"):
        (tmp_path / name).write_bytes(os.urandom(32))
        (tmp_path / name).chmod(0o600)
    store._shared.c.settings = replace(store._shared.c.settings, bundle_key=str(tmp_path / "key"))
    if renamed:
        drop(store, bundle)
    else:
        (folder(store) / "b.tar").write_bytes(bundle.read_bytes())
    settle(store, clock)
    assert "not signed with the key of this store" in refused(store)["b.tar"] and empty(store)
    with kvfs.open(tmp_path / "source") as source:
        for name in ("other", "key"):
            source.export(str(folder(store) / f"{name}.tar"), ["alpha"], key_file=str(tmp_path / name))
    settle(store, clock)
    assert list(refused(store)) == ["b.tar", "other.tar"] and serves(store)


def test_a_file_that_is_copied_is_adopted_when_it_is_complete(store: kvfs.Store, bundle: Path, clock: Clock) -> None:
    data, there = bundle.read_bytes(), folder(store) / "b.tar"
    for share in (0, 100, len(data) // 2, len(data) - 1024):
        there.write_bytes(data[:share])
        settle(store, clock)
        clock.ahead += STALE_SECONDS / 2
        look(store)
        assert there.exists() and empty(store) and refused(store) == {}
    there.write_bytes(data)
    look(store)
    assert there.exists() and empty(store)  # it may still change
    clock.ahead += SETTLE_SECONDS
    look(store)
    assert not there.exists() and serves(store)


def test_a_file_that_never_becomes_complete_is_refused(store: kvfs.Store, bundle: Path, clock: Clock) -> None:
    there = folder(store) / "b.tar"
    there.write_bytes(bundle.read_bytes()[:-2000])
    settle(store, clock, STALE_SECONDS)
    assert not there.exists() and empty(store)
    assert "copy the bundle again" in refused(store)["b.tar"] and counters(store)["bundles_refused"] == 1


def test_a_bundle_that_was_changed_leaves_nothing_behind(store: kvfs.Store, bundle: Path) -> None:
    data = bytearray(bundle.read_bytes())
    data[60_000] ^= 1
    bundle.write_bytes(data)
    there = drop(store, bundle)
    look(store)
    assert not there.exists() and empty(store)
    assert "was changed after it was written" in refused(store)["b.tar"]


def test_names_in_transit_are_left_alone(store: kvfs.Store, bundle: Path, clock: Clock) -> None:
    for name in (".b.tar", "b.tar.tmp", "b.tar.part", "b.tar~"):
        (folder(store) / name).write_bytes(bundle.read_bytes())
    settle(store, clock, STALE_SECONDS)
    assert empty(store) and len(os.listdir(folder(store))) == 4


def make_symlink(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def make_fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def make_open_to_all(path: Path, outside: Path) -> None:
    path.write_bytes(outside.read_bytes())
    path.chmod(0o666)


def make_huge(path: Path, outside: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def make_of_another_user(path: Path, outside: Path) -> None:
    path.write_bytes(outside.read_bytes())
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (make_symlink, "not a regular file"),
        (make_fifo, "not a regular file"),
        (make_socket, "not a regular file"),
        (make_open_to_all, "any user may change it"),
        (make_huge, "this store holds"),
        pytest.param(
            make_of_another_user, "belongs to user 12345", marks=pytest.mark.needs_root("a file of another user")
        ),
    ],
)
def test_what_cannot_be_trusted_is_moved_aside(
    store: kvfs.Store, bundle: Path, clock: Clock, make: Callable[[Path, Path], None], why: str
) -> None:
    before = (bundle.read_bytes(), bundle.stat().st_ctime_ns, bundle.stat().st_nlink)
    make(folder(store) / "odd.tar", bundle)
    settle(store, clock)
    assert why in refused(store)["odd.tar"] and empty(store)
    assert not os.path.lexists(folder(store) / "odd.tar")
    assert before == (bundle.read_bytes(), bundle.stat().st_ctime_ns, bundle.stat().st_nlink)


def test_other_folders_are_not_examined(store: kvfs.Store, bundle: Path, clock: Clock) -> None:
    (folder(store) / "more").mkdir()
    os.rename(bundle, folder(store) / "more" / "b.tar")
    settle(store, clock, STALE_SECONDS)
    assert (folder(store) / "more" / "b.tar").exists() and empty(store)


@pytest.mark.parametrize(
    "name", ["line\nbreak.tar", "\udcff\udcfe.tar", "n" * 250, "..tar", "-rf", "b.tar.reason"], ids=ascii
)
def test_names_are_only_names(store: kvfs.Store, clock: Clock, name: str) -> None:
    (folder(store) / name).write_bytes(b"nothing")
    settle(store, clock, STALE_SECONDS)
    if name.startswith("."):
        return
    aside = os.listdir(folder(store) / "refused")
    assert os.listdir(folder(store)) == ["refused"] and len(aside) == 2
    (reason,) = [n for n in aside if f"{n}.reason" not in aside]
    assert (folder(store) / "refused" / reason).read_text().count("\n") == 1


def test_what_is_refused_is_bounded(store: kvfs.Store, clock: Clock) -> None:
    for n in range(REFUSED_MAX + 9):
        (folder(store) / f"{n:02}").write_bytes(b"nothing")
    settle(store, clock, STALE_SECONDS)
    assert len(refused(store)) == REFUSED_MAX and counters(store)["bundles_refused"] == REFUSED_MAX + 9
    assert len(os.listdir(folder(store) / "refused")) == 2 * REFUSED_MAX


@pytest.mark.parametrize("again", [True, False])
def test_a_refused_bundle_that_is_too_large_to_be_kept_is_not_destroyed(
    store: kvfs.Store, bundle: Path, clock: Clock, tmp_path: Path, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the only copy: more than an eighth of the capacity was deleted, with the advice to drop it again."""
    monkeypatch.setattr(drop_folder, "REFUSED_SHARE", 64 << 20)
    there = drop(store, bundle)
    data = there.read_bytes()
    there.chmod(0o666)
    settle(store, clock)
    assert there.read_bytes() == data and empty(store) and refused(store) == {}
    reason = folder(store) / "refused" / "b.tar.reason"
    assert "chmod o-w" in reason.read_text() and "stays in import/" in reason.read_text()
    assert counters(store)["bundles_refused"] == 1
    settle(store, clock)
    other = DropFolder(store._shared.c, store._shared.services().active)  # another process, and a later one
    tried: list[str] = []
    monkeypatch.setattr(DropFolder, "_take", lambda self, name, *rest: tried.append(name))
    other.arrived("b.tar")
    other.look()
    other.join()
    assert tried == [] and counters(store)["bundles_refused"] == 1
    monkeypatch.undo()
    if again:
        there.chmod(0o600)
    else:
        os.rename(there, tmp_path / "mine")
        (tmp_path / "mine").chmod(0o600)
        drop(store, tmp_path / "mine")
    settle(store, clock)
    assert serves(store) and not there.exists() and not reason.exists()


def test_a_good_bundle_survives_a_disk_that_stays_full(
    store: kvfs.Store, bundle: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Importer, fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drop_folder, "REFUSED_SHARE", 64 << 20)
    there = drop(store, bundle)
    data = there.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Importer, "take", full)
        for _ in range(2 * drop_folder.TRIES_MAX):
            look(store)
            clock.ahead += drop_folder.AGAIN_SECONDS
    assert there.read_bytes() == data and counters(store)["bundles_refused"] == 1
    os.utime(there)
    settle(store, clock)
    assert serves(store) and not there.exists()


def test_refused_files_are_not_deleted_for_new_ones(store: kvfs.Store, clock: Clock) -> None:
    for name in ("first", "second"):
        (folder(store) / name).write_bytes(bytes(5 << 20))  # an eighth of the capacity holds one of them
        settle(store, clock, STALE_SECONDS)
    assert list(refused(store)) == ["first"] and (folder(store) / "second").exists()
    assert (folder(store) / "refused" / "second.reason").exists()


def test_a_symlink_in_place_of_refused_is_not_followed(store: kvfs.Store, clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (folder(store) / "refused").symlink_to(tmp_path / "outside")
    (folder(store) / "junk").write_bytes(b"nothing")
    settle(store, clock, STALE_SECONDS)
    look(store)
    assert os.listdir(tmp_path / "outside") == [] and (folder(store) / "junk").exists()
    assert counters(store)["import_errors"] >= 1


def test_one_process_at_a_time(store: kvfs.Store, bundle: Path) -> None:
    drop(store, bundle)
    other = os.open(folder(store), os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    look(store)
    assert empty(store)
    os.close(other)  # its death would do the same
    look(store)
    assert serves(store)


def test_four_processes_adopt_a_bundle_once(store_path: Path, bundle: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB") as first:
        by_hand(first)
    begin, go = os.pipe()

    def worker() -> int:
        with kvfs.open(store_path) as mine:
            by_hand(mine)
            mine._shared.services().drops.arrived("b.tar")
            os.read(begin, 1)
            look(mine)
            return counters(mine).get("pages_imported", 0)

    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(run_child(worker))) for _ in range(4)]
    os.rename(bundle, store_path / "import" / "b.tar")
    for thread in threads:
        thread.start()
    os.write(go, b"xxxx")
    for thread in threads:
        thread.join()
    assert sum(found) == SEEDS * CHUNKS
    with kvfs.open(store_path) as store:
        by_hand(store)
        store._shared.services().drops.arrived("b.tar")
        look(store)
        assert serves(store) and os.listdir(folder(store)) == []


@pytest.mark.parametrize("step", [1, 2, 30, 160, 162, 170, 200, 300, 321])
def test_after_a_kill_the_next_process_completes_it(
    store_path: Path, bundle: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 after so many steps: digests first, then pages verified, then pages stored."""
    with kvfs.open(store_path, capacity="64MiB") as first:
        by_hand(first)
    os.rename(bundle, store_path / "import" / "b.tar")
    monkeypatch.setattr(drop_folder, "PACE", drop_folder.PACE._replace(batch_bytes=4 * TINY_BYTES))
    child = os.fork()
    if not child:
        steps = [0]
        original = DropFolder._step

        def count(self: DropFolder) -> None:
            steps[0] += 1
            if steps[0] == step:
                os.kill(os.getpid(), signal.SIGKILL)
            original(self)

        DropFolder._step = count  # type: ignore[method-assign]
        mine = kvfs.open(store_path)
        by_hand(mine)
        mine._shared.services().drops.arrived("b.tar")
        look(mine)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert (store_path / "import" / "b.tar").exists()
    with kvfs.open(store_path) as store:
        by_hand(store)
        store._shared.services().drops.arrived("b.tar")
        look(store)
        assert serves(store) and store.verify().ok and os.listdir(folder(store)) == []
        assert store.catalog.namespaces()[0].pages == SEEDS * CHUNKS


def test_closing_the_store_ends_an_import_and_the_bundle_stays(
    store_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = kvfs.open(store_path, capacity="64MiB")
    by_hand(store)
    there = drop(store, bundle)
    reached, original = threading.Event(), DropFolder._step

    def count(self: DropFolder) -> None:
        reached.set()
        self._stopping.wait(60.0)
        original(self)

    monkeypatch.setattr(DropFolder, "_step", count)
    store._shared.services().drops.look()
    thread = store._shared.services().drops._thread
    assert thread is not None and reached.wait(60.0)
    store.close()
    assert not thread.is_alive() and there.exists()


def test_read_only_and_uncounted_stores_adopt_nothing(store_path: Path, bundle: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB"):
        pass
    os.rename(bundle, store_path / "import" / "b.tar")
    with kvfs.open(store_path, counted=False) as store:
        store._shared.services().drops.arrived("b.tar")
        look(store)
        assert empty(store)
    with kvfs.open(store_path, read_only=True) as store:
        assert DROPS not in {c.name for c in store._shared.background._tasks}
    assert os.listdir(store_path / "import") == ["b.tar"]


def test_without_room_it_is_tried_again_and_not_forever(
    store: kvfs.Store, bundle: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def full(self: Importer, fd: int) -> None:
        tries.append(fd)
        raise NoSpaceError("no room for more")

    drop(store, bundle)
    with monkeypatch.context() as patch:
        patch.setattr(Importer, "take", full)
        for n in range(1, 4):
            look(store)
            look(store)
            assert len(tries) == n and refused(store) == {}
            clock.ahead += drop_folder.AGAIN_SECONDS
    look(store)
    assert serves(store)
    with monkeypatch.context() as patch:
        patch.setattr(Importer, "take", full)
        (folder(store) / "c.tar").write_bytes(b"x")
        store._shared.services().drops.arrived("c.tar")
        for _ in range(drop_folder.TRIES_MAX):
            look(store)
            clock.ahead += drop_folder.AGAIN_SECONDS
    assert "no room" in refused(store)["c.tar"]


def test_a_file_that_cannot_be_removed_is_adopted_once(
    store: kvfs.Store, bundle: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = drop(store, bundle)

    def refuse(name: str, *, dir_fd: int) -> None:
        raise PermissionError(1, "sticky")

    monkeypatch.setattr(clock, "unlink", refuse)
    look(store)
    settle(store, clock)
    monkeypatch.undo()
    assert there.exists() and counters(store)["bundles_adopted"] == 1 and serves(store)


def test_a_bug_refuses_the_file_and_not_the_next(
    store: kvfs.Store, bundle: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Importer.take

    def crash(self: Importer, fd: int) -> object:
        if os.fstat(fd).st_size == 1:
            raise AssertionError("a bug")
        return original(self, fd)

    monkeypatch.setattr(Importer, "take", crash)
    (folder(store) / "a.tar").write_bytes(b"x")
    drop(store, bundle)
    store._shared.services().drops.arrived("a.tar")
    look(store)
    assert "kvfs failed on it" in refused(store)["a.tar"] and serves(store)


def test_a_dropped_bundle_is_adopted_by_a_worker(store_path: Path, bundle: Path) -> None:
    """End to end: a worker in another process, its background tasks and its watch."""
    with kvfs.open(store_path, capacity="64MiB"):
        pass

    def worker() -> bool:
        with kvfs.open(store_path) as mine:
            os.rename(bundle, store_path / "import" / "b.tar")
            waited = threading.Event()
            while (store_path / "import" / "b.tar").exists():
                waited.wait(0.01)
            return serves(mine)

    assert run_child(worker)


@pytest.mark.parametrize(
    ("bound", "why"),
    [({"members_max": 1}, "more than 1 files"), ({"records_max": 20}, "records"), ({"page_bytes_max": 9}, "a page of")],
)
@pytest.mark.parametrize("renamed", [True, False])
def test_what_would_be_worked_on_without_a_pause_is_refused(
    store: kvfs.Store, bundle: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, bound: dict[str, int], why: str,
    renamed: bool,
) -> None:  # fmt: skip
    """A bundle of 99,000 empty files, or one segment of millions of records, kept the GIL from an engine."""
    monkeypatch.setattr(drop_folder, "PACE", drop_folder.PACE._replace(**bound))
    if renamed:
        drop(store, bundle)
    else:
        (folder(store) / "b.tar").write_bytes(bundle.read_bytes())
    settle(store, clock)
    assert why in refused(store)["b.tar"] and "kvfs import" in refused(store)["b.tar"] and empty(store)
    store.import_bundle(str(folder(store) / "refused" / "b.tar"))
    assert serves(store)


def test_reading_a_bundle_pauses_between_its_files_and_tables(store: kvfs.Store, bundle: Path) -> None:
    steps: list[int] = []
    pace = Pace(step=lambda: steps.append(1))
    importer = Importer(store._shared.c, store._shared.services().active, partial_=False, pace=pace)
    with open(bundle, "rb") as file:
        members = importer.members(file.fileno(), bundle.stat().st_size)
        assert len(steps) == len(members) + 1  # and the manifest
        steps.clear()
        assert importer._scan(file.fileno(), members[0]) is not None and len(steps) > 2


def test_an_incomplete_file_is_examined_ever_less_often(
    store: kvfs.Store, bundle: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, original = [], Importer.members

    def count(self: Importer, fd: int, size: int, digest: str | None = None) -> object:
        looks.append(clock.ahead)
        return original(self, fd, size, digest)

    monkeypatch.setattr(Importer, "members", count)
    (folder(store) / "b.tar").write_bytes(bundle.read_bytes()[:-2000])
    for _ in range(150):
        look(store)
        clock.ahead += SETTLE_SECONDS
    assert 4 < len(looks) < 15 and refused(store) == {}


@pytest.mark.parametrize("moment", ["before", "killed"])
def test_a_bundle_that_replaces_an_adopted_one_is_not_deleted_unread(
    store: kvfs.Store, bundle: Path, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another process renames a new bundle over an adopted one just before that is removed."""
    with kvfs.open(tmp_path / "more", capacity="32MiB") as other:
        other.namespace("beta", tiny(), "1b").put(tokens_of(9, CHUNKS), seeded(9, CHUNKS * TINY_BYTES))
        other.export(str(tmp_path / "new.tar"), ["beta"])
    there, original = drop(store, bundle), clock.stat

    def replaced(name: str, *, dir_fd: int) -> os.stat_result:
        st = original(name, dir_fd=dir_fd)
        if name == "b.tar" and counters(store).get("bundles_adopted") and (tmp_path / "new.tar").exists():
            os.rename(tmp_path / "new.tar", there)
        return st

    if moment == "before":
        with monkeypatch.context() as patch:
            patch.setattr(clock, "stat", replaced)
            look(store)
    else:
        os.rename(tmp_path / "new.tar", folder(store) / ".adopted-0123456789abcdef")
        look(store)
    assert not (tmp_path / "new.tar").exists() and serves(store)
    settle(store, clock)
    ns = store.namespace("beta", tiny(), "1b")
    assert restored(ns, tokens_of(9, CHUNKS)) == seeded(9, CHUNKS * TINY_BYTES)
    assert os.listdir(folder(store)) == []

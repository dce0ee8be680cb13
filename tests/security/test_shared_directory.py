"""Another user can write the directory of a store: links, fifos, devices, swapped and huge files, odd names.

The promise: opening and using the store does not hang, raises nothing but kvfs's own errors, touches nothing outside
the directory, and serves right bytes or none. A user who may write the directory may delete its files and forge pages
(XXH3 is no signature); see docs/reliability.md.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.errors import IndexUnavailableError, KvfsError
from kvfs.index.lmdb_files import discard_generation
from kvfs.index.tables import ACTIVE
from kvfs.native import library
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, restored, run_child, seeded, segment_files, tiny, tokens_of

CHUNKS = 6
TOKENS, PAGES = tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES)
SECRET = b"another program's data, 4 KiB of it. " * 111
NO_OWNER = 65534


def namespace(store: kvfs.Store, **identity: str) -> kvfs.Namespace:
    return store.namespace("m", tiny(), revision="r1", **identity)


@pytest.fixture
def path(memory_path: Path) -> Path:
    """A closed store with one pinned prompt in it, and one that is not."""
    with kvfs.open(memory_path / "store", capacity="16MiB", segment_bytes="256KiB") as store:
        ns = namespace(store)
        assert ns.put(TOKENS, PAGES).stored == CHUNKS
        assert ns.put(tokens_of(2, CHUNKS), seeded(2, CHUNKS * TINY_BYTES)).stored == CHUNKS
        store.pin("p", ns, TOKENS)
        assert restored(ns, TOKENS) == PAGES  # writes access times
    return memory_path / "store"


@pytest.fixture
def victim(memory_path: Path) -> Iterator[Path]:
    """A folder outside the store; nothing in it may change."""
    folder = memory_path / "victim"
    folder.mkdir()
    (folder / "file").write_bytes(SECRET)
    (folder / "other").write_bytes(SECRET)
    before = tree(folder)
    yield folder
    assert tree(folder) == before, "something outside the store was changed"


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(p.relative_to(folder)): (p.lstat().st_mode, p.read_bytes() if p.is_file() else b"")
        for p in [folder, *folder.rglob("*")]
    }


def use(path: Path, *, read_only: bool = False) -> bool:
    """Use the whole store; whether every step succeeded. Only KvfsError may be raised."""
    try:
        with kvfs.open(path, read_only=read_only) as store:
            fine = store.wait_ready(20.0)
            ns = namespace(store)
            found = restored(ns, TOKENS)
            assert found == PAGES[: len(found)]
            with ns.match(TOKENS) as match:
                views = ns.view(match)
            assert all(bytes(v) == PAGES[i * TINY_BYTES :][:TINY_BYTES] for i, v in enumerate(views))
            store.stats()
            names = [pin.name for pin in store.pins()]
            if read_only:
                return fine and names == ["p"] and bool(found)
            put = ns.put(tokens_of(3, 2), seeded(3, 2 * TINY_BYTES))
            fine &= put.stored + put.skipped == 2 and restored(ns, tokens_of(3, 2)) == seeded(3, 2 * TINY_BYTES)
            store.verify(repair=True)
            fine &= store.wait_ready(20.0)
            store.gc(target_bytes=0)
            crashed = [name for name in store.stats()["counters"] if name.endswith("_crashed")]
            assert not crashed, crashed
            return fine
    except KvfsError as exc:
        assert str(path) in str(exc), exc
        return False


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "symlink to a file": lambda place, victim: place.symlink_to(victim / "file"),
    "symlink to a directory": lambda place, victim: place.symlink_to(victim),
    "symlink to nothing": lambda place, victim: place.symlink_to(victim / "new"),
    "fifo": lambda place, victim: os.mkfifo(place),
    "socket": lambda place, victim: _socket(place),
    "directory": lambda place, victim: place.mkdir(),
    "full directory": lambda place, victim: (place.mkdir(), (place / "x").write_bytes(b"x")),
    "huge file": lambda place, victim: (place.touch(), os.truncate(place, 1 << 40)),
}


def _socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = os.getcwd()
        os.chdir(place.parent)  # names of sockets are short
        try:
            one.bind(place.name)
        finally:
            os.chdir(here)


def generation(path: Path) -> Path:
    return path / "index" / (path / "index" / "CURRENT").read_text()


def active(path: Path) -> Path:
    """The segment that is not sealed."""
    with kvfs.open(path) as store:
        rows = store._shared.c.index.read(lambda s: s.segments_in(ACTIVE), 5.0)
    (row,) = [row for _, row in rows]
    return path / "segments" / f"{row.segment_id.hex()}.kvs"


def access_times(path: Path) -> Path:
    return min((path / "run" / "use").iterdir())


#: What is replaced -> whether the store goes on without it.
PLACES: dict[str, tuple[Callable[[Path], Path], bool]] = {
    "super": (lambda p: p / "super", False),
    "kvfs.toml": (lambda p: p / "kvfs.toml", False),
    "gate": (lambda p: p / "gate", False),
    "main": (lambda p: p / "main", False),
    "state": (lambda p: p / "state", True),
    "CURRENT": (lambda p: p / "index" / "CURRENT", True),
    "generation": (generation, True),
    "data.mdb": (lambda p: generation(p) / "data.mdb", True),
    "users": (lambda p: generation(p) / "users", True),
    "a segment": (lambda p: segment_files(p)[0], True),
    "access times": (access_times, True),
    "a pin": (lambda p: next((p / "pins").iterdir()), True),
    "run/gc": (lambda p: p / "run" / "gc", False),
    "segments": (lambda p: p / "segments", False),
    "index": (lambda p: p / "index", False),
    "run": (lambda p: p / "run", False),
    "pins": (lambda p: p / "pins", False),
    "doomed": (lambda p: p / "doomed", False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_any_kind_of_file_in_place_of_another(path: Path, victim: Path, place: str, kind: str) -> None:
    find, goes_on = PLACES[place]
    at = find(path)
    directory = at.is_dir()
    shutil.rmtree(at) if directory else at.unlink()
    KINDS[kind](at, victim)
    lost = restored_after(path)
    if goes_on:
        assert lost, f"the store does not go on with a {kind} in place of {place}"


def restored_after(path: Path) -> bool:
    """Open it in both ways; the second open for writing must work like the first."""
    use(path, read_only=True)
    fine = use(path)
    assert use(path) >= fine
    return fine


@pytest.mark.needs_root("only root may make device nodes")
@pytest.mark.parametrize("place", PLACES)
def test_devices_are_not_read(path: Path, victim: Path, place: str) -> None:
    """/dev/zero never ends."""
    at = PLACES[place][0](path)
    shutil.rmtree(at) if at.is_dir() else at.unlink()
    try:
        os.mknod(at, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("no device nodes here")
    restored_after(path)


# ---------------------------------------------------------------- hard links


def test_access_times_are_not_written_through_a_hard_link(path: Path, victim: Path) -> None:
    at = access_times(path)
    at.unlink()
    os.link(victim / "file", at)
    assert use(path)


def test_a_segment_with_two_names_is_read_and_never_appended_to(path: Path, victim: Path) -> None:
    """A snapshot by hard links must stay what it was."""
    segment = active(path)
    os.link(segment, path.parent / "snapshot")
    before = segment.read_bytes()
    with kvfs.open(path) as store:
        ns = namespace(store)
        assert ns.put(tokens_of(9, 3), seeded(9, 3 * TINY_BYTES)).stored == 3
        assert restored(ns, TOKENS) == PAGES
    assert (path.parent / "snapshot").read_bytes() == before


def test_two_stores_do_not_share_an_index_by_hard_links(path: Path, victim: Path) -> None:
    """``cp -al``: same device, same inode, closed cleanly, and yet another store."""
    copy = path.parent / "copy"
    shutil.copytree(path, copy, copy_function=os.link)
    tokens, pages = tokens_of(50, 4), seeded(50, 4 * TINY_BYTES)
    for one in (path, copy, path, copy):
        with kvfs.open(one) as store:
            assert store.wait_ready(20)
            put = namespace(store).put(tokens, pages)
            assert put.stored + put.skipped == 4
            assert restored(namespace(store), tokens) == pages
            assert restored(namespace(store), TOKENS) == PAGES
            assert store._shared.c.index.read(lambda s: s.check_ledger(), 5.0)
            assert store.verify().ok
    assert not os.path.samefile(generation(path) / "data.mdb", generation(copy) / "data.mdb")


# ---------------------------------------------------------------- swaps, while the store is in use


def test_lock_files_that_were_replaced_are_not_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that lock different files would both write the index. Native lookups need no lock."""
    monkeypatch.setattr(library, "loaded", lambda: None)
    with kvfs.open(path) as store:
        ns = namespace(store)
        for name in ("gate", "main"):
            assert restored(ns, TOKENS) == PAGES
            os.rename(path / name, path / "aside")
            (path / name).touch(0o600)
            assert ns.match(TOKENS).tokens == 0
            put = ns.put(tokens_of(7, 2), seeded(7, 2 * TINY_BYTES))
            assert (put.stored, put.declined) == (0, 2)
            os.rename(path / "aside", path / name)
        assert restored(ns, TOKENS) == PAGES


class SwappingFiles(Files):
    """Replaces a name by a symlink to another folder just before its n-th open."""

    def __init__(self, victim: Path, nth: int) -> None:
        self.left, self.victim = nth, victim

    def open(self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int, **more: Any) -> int:
        self.left -= 1
        if not self.left and not name.startswith("."):
            folder = Path(os.readlink(f"/proc/self/fd/{dir_fd}"))
            if (folder / name).exists():
                os.rename(folder / name, folder.parent / f"swapped-{name}")
                (folder / name).symlink_to(self.victim / ("" if flags & os.O_DIRECTORY else "file"))
        return super().open(name, flags, mode, dir_fd=dir_fd, **more)


@pytest.mark.parametrize("share", range(3))
def test_a_name_that_is_swapped_between_two_opens(path: Path, victim: Path, share: int) -> None:
    for nth in range(1 + share, 40, 3):
        copy = path.parent / f"copy{nth}"
        shutil.copytree(path, copy)
        try:
            with kvfs.open(copy, files=SwappingFiles(victim, nth)) as store:
                store.wait_ready(0.5)
                ns = namespace(store)
                found = restored(ns, TOKENS)
                assert found == PAGES[: len(found)]
                ns.put(tokens_of(7, 2), seeded(7, 2 * TINY_BYTES))
                store.gc(target_bytes=0)
        except KvfsError as exc:
            assert str(copy) in str(exc) or isinstance(exc, IndexUnavailableError)
        shutil.rmtree(copy)


def exchange(one: Path, other: Path) -> None:
    """Swap two names atomically (renameat2)."""
    at_cwd, swap = -100, 2
    call = ctypes.CDLL(None, use_errno=True).renameat2
    assert call(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), swap) == 0, os.strerror(ctypes.get_errno())


def test_a_directory_that_is_swapped_in_a_loop(path: Path, victim: Path) -> None:
    """``segments`` alternates between a directory and a symlink."""
    stop, link = threading.Event(), path.parent / "link"
    link.symlink_to(victim)

    def swap() -> None:
        while not (stop.is_set() and link.is_symlink()):  # stops with all in place
            exchange(link, path / "segments")

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for _ in range(30):
            try:
                with kvfs.open(path) as store:
                    found = restored(namespace(store), TOKENS)
                    assert found == PAGES[: len(found)]
            except KvfsError as exc:
                assert str(path) in str(exc)
    finally:
        stop.set()
        swapper.join()
    with kvfs.open(path) as store:
        assert store.wait_ready(20) and restored(namespace(store), TOKENS) == PAGES


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name",
    ["a\nb", "\udcff\udcfe", "z" * 255, "z" * 32, "z" * 32 + ".kvs", "-rf", "*", "0" * 31 + "g", ".x", "%s%n"],
    ids=ascii,
)
def test_odd_names_are_left_alone_or_moved_aside(path: Path, name: str) -> None:
    folders = ("", "segments", "doomed", "index", "run", "run/use", "pins", "import", "quarantine")
    for folder in folders:
        (path / folder / name).write_bytes(b"x")
    (path / "index" / "CURRENT").unlink()
    assert use(path)
    with kvfs.open(path) as store:
        assert store.verify().ok
    assert all((path / folder / name).exists() for folder in ("", "import", "quarantine"))
    assert not (path / "segments" / name).exists()  # a repair moves it aside and deletes nothing
    assert sum(file.read_bytes() == b"x" for file in (path / "quarantine").iterdir() if file.is_file()) >= 2


# ---------------------------------------------------------------- owners


@pytest.mark.needs_root("files of another user")
def test_files_of_another_user_are_refused_or_served(path: Path) -> None:
    for file in [path, *path.rglob("*")]:
        os.chown(file, NO_OWNER, NO_OWNER)
    assert use(path)  # root may do everything
    for file in [path, *path.rglob("*")]:
        os.chown(file, 0, 0)
    path.parent.chmod(0o711)

    def as_nobody() -> str:
        try:
            kvfs.open(path).close()
        except KvfsError as exc:
            return type(exc).__name__
        return "opened"

    assert run_child(as_nobody, uid=NO_OWNER) == "StoreAccessError"


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o755, 0o775])
def test_access_of_others_is_removed(path: Path, mode: int) -> None:
    path.chmod(mode)
    assert use(path)
    assert not stat.S_IMODE(path.stat().st_mode) & 0o007


# ---------------------------------------------------------------- tenants


def test_a_co_tenant_who_guesses_a_prompt_learns_nothing_without_the_salt(path: Path) -> None:
    """Same process, same store, same model, same tokens."""
    with kvfs.open(path) as store:
        mine = namespace(store, salt="my secret")
        tokens, pages = tokens_of(20, CHUNKS), seeded(20, CHUNKS * TINY_BYTES)
        assert mine.put(tokens, pages).stored == CHUNKS
        for salt in ("", "my secreT", "my secret ", "m", "MY SECRET"):
            other = namespace(store, salt=salt) if salt else namespace(store)
            assert other.match(tokens).tokens == 0
            assert other.plan_save(tokens).missing["full"] == tuple(range(CHUNKS))
            with mine.match(tokens) as match, pytest.raises(KvfsError, match="another namespace"):
                other.get(match, bytearray(match.nbytes))
            put = other.put(tokens, seeded(21, CHUNKS * TINY_BYTES))
            assert put.stored == CHUNKS, "skipped would reveal that another tenant has this prompt"
        assert restored(mine, tokens) == pages


def test_the_salt_is_not_in_the_directory(path: Path) -> None:
    with kvfs.open(path) as store:
        namespace(store, salt="correct horse battery").put(tokens_of(20, 2), seeded(20, 2 * TINY_BYTES))
    assert not any(b"correct horse" in f.read_bytes() for f in path.rglob("*") if f.is_file())


def test_hashes_of_two_tenants_have_nothing_in_common(path: Path) -> None:
    with kvfs.open(path) as store:
        one, two = (set(namespace(store, salt=s).plan_save(TOKENS).hashes) for s in ("a", "b"))
        assert not one & two and len(one) == CHUNKS


@pytest.mark.parametrize("there", ["a link to nothing", "a link to a file", "a directory of another program"])
def test_an_index_directory_that_was_exchanged_leads_nowhere(path: Path, victim: Path, there: str) -> None:
    """LMDB opens paths, and follows links. The store's own directory stays in use, wherever it was moved."""
    with kvfs.open(path) as store:
        name, moved = generation(path).name, path / "moved"
        with open(generation(path) / "users") as users:
            fcntl.flock(users, fcntl.LOCK_SH)  # another process is alive: the index is trusted
            (path / "index").rename(moved)
            if there == "a directory of another program":
                name = "deadbeefdeadbeef"
                (victim / name).mkdir()
                (victim / name / "file").write_bytes(SECRET)
                (path / "index").symlink_to(victim)
                (moved / name).mkdir()  # cannot be opened, so it is removed
            else:
                (path / "index" / name).mkdir(parents=True)
                target = victim / ("new" if there == "a link to nothing" else "file")
                (path / "index" / name / "data.mdb").symlink_to(target)
            before = tree(victim)
            (moved / "new").write_text(name)
            (moved / "new").rename(moved / "CURRENT")  # makes every process open the index again
            ns = namespace(store)
            assert restored(ns, TOKENS) in (b"", PAGES)
            assert store.wait_ready(20.0) and restored(ns, TOKENS) == PAGES
            assert tree(victim) == before
        if there == "a directory of another program":
            shutil.rmtree(victim / name)


@pytest.mark.parametrize("how", ["link", "links inside", "fifo"])
def test_removing_a_generation_follows_no_link(tmp_path: Path, victim: Path, how: str) -> None:
    place = tmp_path / "generation"
    if how == "link":
        place.symlink_to(victim)
    elif how == "fifo":
        os.mkfifo(place)
    else:
        (place / "deep" / "deeper").mkdir(parents=True)
        (place / "deep" / "deeper" / "file").write_bytes(SECRET)
        (place / "deep" / "link").symlink_to(victim)
        (place / "data.mdb").symlink_to(victim / "file")
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        discard_generation(Files(), folder, "generation")
    finally:
        os.close(folder)
    assert not os.path.lexists(place)

"""What operators may switch, and epochs of weights that change in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvfs
from kvfs.doctor.checks import diagnose
from kvfs.doctor.findings import BAD
from kvfs.errors import ConfigError, StoreNotFoundError, StoreReadOnlyError
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, restored, run_child, seeded, tiny, tokens_of

TOKENS, PAGES = tokens_of(1, 5), seeded(1, 5 * TINY_BYTES)


@pytest.fixture
def path(memory_path: Path) -> Path:
    return memory_path / "store"


def space(store: kvfs.Store, **how: Any) -> kvfs.Namespace:
    return store.namespace("m", tiny(), revision="r1", **how)


def saved(ns: kvfs.Namespace, chunks: int = 5) -> tuple[kvfs.TransferState, int, str]:
    """Result of a save of an engine's blocks of 16 tokens."""
    blocks = np.zeros((2, chunks, 16, 2, 8), "uint16")
    with ns.attach(kvfs.describe(ns.layout.groups[0], blocks, "layer,block,token,head,2*dim")) as io:
        waited: list[bool] = []
        transfer = io.save(ns.plan_save(tokens_of(3, chunks)), list(range(chunks)), lambda: waited.append(True))
        result = transfer.wait(30)
        assert result is not None and transfer.source_free.is_set()
        assert not waited, "nothing is copied for a store that will take nothing"
        return transfer.state, result.declined, result.reason


def brought_back(ns: kvfs.Namespace, chunks: int = 5) -> tuple[kvfs.TransferState, int, int]:
    """Result of a restore into an engine's blocks of 16 tokens."""
    blocks = np.zeros((2, chunks, 16, 2, 8), "uint16")
    with ns.attach(kvfs.describe(ns.layout.groups[0], blocks, "layer,block,token,head,2*dim")) as io:
        transfer = io.restore(TOKENS, list(range(chunks)))
        result = transfer.wait(30)
        assert result is not None
        return transfer.state, result.tokens, result.declined


def tree(path: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in [path, *path.rglob("*")]}


class Untouched(Files):
    """No call reaches the file system."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the file system was touched")

    open = create = open_root = mkdir = listdir = rename = unlink = stat = fstat = preadv = pwritev = flock = _refuse


# ---------------------------------------------------------------- KVFS_DISABLE


@pytest.mark.parametrize("value", ["1", "true", " YES ", "on"])
@pytest.mark.parametrize("there", [True, False])
def test_a_store_that_is_switched_off_breaks_nothing_and_touches_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, value: str, there: bool
) -> None:
    if there:
        with kvfs.open(path, capacity="16MiB") as store:
            assert space(store).put(TOKENS, PAGES).stored == 5
        before = tree(path)
    monkeypatch.setenv("KVFS_DISABLE", value)
    with kvfs.open(path, files=Untouched()) as store:
        ns = space(store)
        assert store.wait_ready(0.0)
        assert ns.put(TOKENS, PAGES) == (0, 0, 5, 0, "disabled")
        assert ns.put(TOKENS, PAGES[TINY_BYTES:], start=1) == (0, 0, 4, 0, "disabled")
        with ns.match(TOKENS) as match:
            assert (match.tokens, ns.get(match, bytearray()), ns.view(match), match.pages) == (0, 0, [], [])
        assert ns.plan_save(TOKENS).missing == {ns.layout.groups[0].name: (0, 1, 2, 3, 4)}
        assert ns.new_epoch().put(TOKENS, PAGES).reason == "disabled"
        assert saved(ns) == (kvfs.TransferState.DECLINED, 5, "disabled")
        assert brought_back(ns) == (kvfs.TransferState.DONE, 0, 0)
        assert store.pin("p", ns, TOKENS) == 0 and store.unpin("p") is False and store.pins() == []
        assert store.gc()["segments_dropped"] == 0
        stats = store.stats()
        assert stats["index"]["state"] == "disabled" and stats["counters"]["pages_declined_disabled"] == 19
        for ask in (lambda: store.purge("m"), store.verify):
            with pytest.raises(ConfigError, match="KVFS_DISABLE"):
                ask()
        huge = kvfs.PageLayout.opaque(1 << 30, 16)
        assert store.namespace("large", huge, revision="r1").match_keys([b"k"]).tokens == 0
    if there:
        assert tree(path) == before
    else:
        assert not path.exists()
    monkeypatch.setenv("KVFS_DISABLE", "0")
    if there:
        with kvfs.open(path) as store:
            assert restored(space(store), TOKENS) == PAGES


def test_no_path_is_needed_to_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFS_DISABLE", "1")
    monkeypatch.delenv("KVFS_DIR", raising=False)
    with kvfs.open() as store:
        assert space(store).match(TOKENS).tokens == 0
        assert run_child(lambda: space(store).put(TOKENS, PAGES).reason) == "disabled"


def test_closing_a_store_that_is_switched_off_closes_its_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFS_DISABLE", "1")
    with kvfs.open("x") as store:
        ns = space(store)
        blocks = np.zeros((2, 1, 16, 2, 8), "uint16")
        io = ns.attach(kvfs.describe(ns.layout.groups[0], blocks, "layer,block,token,head,2*dim"))
    with pytest.raises(ConfigError, match="closed"):
        io.restore(TOKENS, [0])


def test_bad_arguments_raise_although_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFS_DISABLE", "1")
    with kvfs.open("x") as store, pytest.raises(ConfigError):
        space(store).put(TOKENS, PAGES[1:])
    with pytest.raises(ConfigError, match="threads"):
        kvfs.open("x", threads=0)


@pytest.mark.parametrize("name", ["KVFS_DISABLE", "KVFS_READONLY"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "perhaps")
    with pytest.raises(ConfigError, match=f"{name} is 'perhaps'"):
        kvfs.open(path, capacity="16MiB")
    assert not path.exists()


# ---------------------------------------------------------------- KVFS_READONLY


def test_puts_decline_where_operators_allow_only_reading(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFS_READONLY", "1")
    with pytest.raises(StoreNotFoundError):
        kvfs.open(path, capacity="16MiB")
    monkeypatch.delenv("KVFS_READONLY")
    with kvfs.open(path, capacity="16MiB") as store:
        assert space(store).put(TOKENS, PAGES).stored == 5
    monkeypatch.setenv("KVFS_READONLY", "1")
    before = tree(path)
    with kvfs.open(path) as store:
        assert store.read_only
        assert restored(space(store), TOKENS) == PAGES
        assert space(store).put(tokens_of(2, 5), PAGES) == (0, 0, 5, 0, "read-only")
        assert run_child(lambda: space(store).put(tokens_of(2, 5), PAGES).reason) == "read-only"
        assert saved(space(store)) == (kvfs.TransferState.DECLINED, 5, "read-only")
        assert space(store).new_epoch().match(TOKENS).tokens == 0
    assert tree(path) == before
    with kvfs.open(path, read_only=True) as store, pytest.raises(StoreReadOnlyError):
        space(store).put(TOKENS, PAGES)  # code that asks for read_only itself gets an error
    with kvfs.open(path, read_only=True) as store, pytest.raises(StoreReadOnlyError):
        saved(space(store))


# ---------------------------------------------------------------- epochs


def test_nothing_stored_before_a_change_of_the_weights_is_found(path: Path) -> None:
    with kvfs.open(path, capacity="16MiB") as store:
        old = space(store)
        old.put(TOKENS, PAGES)
        new = old.new_epoch()
        assert old.identity.epoch == 0
        assert new.match(TOKENS).tokens == 0
        assert new.put(TOKENS, PAGES[::-1]).stored == 5
        assert restored(new, TOKENS) == PAGES[::-1] and restored(old, TOKENS) == PAGES
        assert new.new_epoch().match(TOKENS).tokens == 0
        epoch = new.identity.epoch
    with kvfs.open(path) as store:
        assert restored(space(store, epoch=epoch), TOKENS) == PAGES[::-1], "what another rank opens"


def test_no_two_epochs_are_equal(path: Path) -> None:
    with kvfs.open(path, capacity="16MiB") as store:
        ns = space(store)

        def raised() -> list[int]:
            return [ns.new_epoch().identity.epoch for _ in range(100)]

        found = [*raised(), *run_child(raised), *run_child(raised)]
    assert len(set(found)) == 300 and 0 not in found


def test_the_epochs_that_an_earlier_version_recorded_are_ignored(path: Path) -> None:
    kvfs.open(path, capacity="16MiB").close()
    (path / "epochs").mkdir()
    (path / "epochs" / f"{1:016x}-{2:016x}").touch()
    with kvfs.open(path) as store:
        assert space(store).new_epoch().put(TOKENS, PAGES).stored == 5
        assert store.verify().ok
    assert not [finding for finding in diagnose(str(path), Files()) if finding.status == BAD]

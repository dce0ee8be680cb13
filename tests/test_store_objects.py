"""Store, Namespace and PrefixMatch as objects: how they print, pickle, complete, and answer after the close."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvfs
from kvfs.pages.identity import Identity
from tests.stores import TINY_BYTES, restored, seeded, tiny, tokens_of

PAGES = seeded(1, 40 * TINY_BYTES)


@pytest.fixture
def path(store_path: Path) -> Path:
    with kvfs.open(store_path, capacity="64MiB") as store:
        store.namespace("alpha", tiny(), "9213176").put(tokens_of(1, 40), PAGES)
    return store_path


def test_a_match_of_many_pages_prints_as_a_line(path: Path) -> None:
    with kvfs.open(path) as store:
        ns = store.namespace("alpha", tiny(), "weights-8b156518aaaaaaaa")
        assert repr(store) == f"<Store {path}, limit 64.0 MiB>"
        assert repr(ns) == f"<Namespace alpha@weights-8b156518 in {path}>"
        with store.namespace("alpha", tiny(), "9213176").match(tokens_of(1, 40)) as match:
            assert repr(match) == f"<PrefixMatch 640 tokens, pages 40 of full, {40 * TINY_BYTES} bytes>"
        with kvfs.open(path) as second:
            pass
        assert repr(second) == f"<Store {path}, limit 64.0 MiB, closed>"


def test_use_after_the_close_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with kvfs.open(path) as store:
        ns = store.namespace("alpha", tiny(), "9213176")
    with caplog.at_level(logging.WARNING, "kvfs"):
        assert ns.put(tokens_of(2, 3), bytes(3 * TINY_BYTES)) == (0, 0, 3, 0, "closed")
        assert ns.match(tokens_of(1, 40)).tokens == 0
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: a namespace is used after its store was closed: open it again"
    ]
    with pytest.raises(kvfs.ConfigError, match="was closed"):
        store.stats()


def test_a_store_that_another_object_keeps_open_is_not_closed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with kvfs.open(path) as other:
        with kvfs.open(path) as store:
            ns = store.namespace("alpha", tiny(), "9213176")
        assert ns.match(tokens_of(1, 40)).tokens == 640 and other.read_only is False
    assert not caplog.records


def load_all(ns: kvfs.Namespace) -> bytes:
    return restored(ns, tokens_of(1, 40))


def describe_store(store: kvfs.Store) -> tuple[bool, int]:
    with store:
        return store.read_only, store.stats()["capacity_bytes"]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_namespace_and_a_store_reach_other_processes_by_path(path: Path, method: str) -> None:
    with kvfs.open(path) as store:
        ns = store.namespace("alpha", tiny(), "9213176", codec="zstd")
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply_async(load_all, (ns,)).get(60) == PAGES
            assert pool.apply_async(describe_store, (store,)).get(60) == (False, 64 << 20)
            pool.close()
            pool.join()


def test_what_is_pickled_is_reopened_as_it_was(path: Path) -> None:
    with kvfs.open(path, read_only=True) as store:
        again = pickle.loads(pickle.dumps(store))
        assert again.read_only and again.path == store.path
        again.close()
    with kvfs.open(path) as store:
        ns = store.namespace(
            "beta", tiny(), "77fe01b", "a salt", rope={"theta": 1e6}, adapter="ad", epoch=3, extra={"k": [1]},
            codec="planes",
        )  # fmt: skip
        packed = pickle.dumps(ns)
        again = pickle.loads(packed)
        assert (again.identity, again.codec) == (ns.identity, "planes")
        again.put(tokens_of(1, 2), bytes(2 * TINY_BYTES))
        assert ns.match(tokens_of(1, 2)).tokens == 32
    with pytest.raises(kvfs.ConfigError, match="was closed"):
        pickle.dumps(store)
    moved = path.rename(path.with_name("moved"))
    with pytest.raises(kvfs.StoreNotFoundError, match="does not exist"):
        pickle.loads(packed)
    assert moved.exists() and not path.exists()


def test_the_keywords_of_a_namespace_are_those_of_its_identity(path: Path) -> None:
    parameters = inspect.signature(kvfs.Store.namespace).parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    assert set(inspect.signature(Identity).parameters) <= set(parameters)
    with kvfs.open(path) as store, pytest.raises(TypeError, match="slat"):
        store.namespace("alpha", tiny(), "9213176", slat="x")  # type: ignore[call-arg]


class bfloat16:  # as ml_dtypes and torch name theirs
    pass


@pytest.mark.parametrize(
    ("dtype", "short"),
    [
        (np.float16, "f16"), (np.dtype("float16"), "f16"), ("half", "f16"), ("fp16", "f16"), ("FLOAT16", "f16"),
        (np.float32, "f32"), ("fp32", "f32"), (bfloat16, "bf16"), ("BF16", "bf16"), ("torch.bfloat16", "bf16"),
        (np.int8, "int8"),
    ],
)  # fmt: skip
def test_dtypes_of_numpy_and_torch_are_named_by_their_objects(dtype: Any, short: str) -> None:
    scale = {"scale_digest": "unit"} if short == "int8" else {}
    layout = kvfs.PageLayout.kv(layers=1, kv_heads=1, head_dim=8, dtype=dtype, **scale)
    assert layout.groups[0].cell.encoding.startswith(f"{short} ")


@pytest.mark.parametrize("dtype", [np.float64, int, "fp8", object(), None])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(kvfs.ConfigError, match="dtype is"):
        kvfs.PageLayout.kv(layers=1, kv_heads=1, head_dim=8, dtype=dtype)


def test_torch_dtypes_are_taken() -> None:
    torch = pytest.importorskip("torch")
    layout = kvfs.PageLayout.kv(layers=1, kv_heads=1, head_dim=8, dtype=torch.bfloat16)
    assert layout.groups[0].cell.encoding.startswith("bf16 ")


def public_attributes() -> list[tuple[str, Any]]:
    classes = [kvfs.Store, kvfs.Namespace, kvfs.PrefixMatch, kvfs.Transfer, kvfs.PageLayout, kvfs.Group, kvfs.Part]
    found = []
    for cls in classes:
        for name, member in vars(cls).items():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if not name.startswith("_") and callable(function):
                found.append((f"{cls.__name__}.{name}", function))
    return found


def test_every_public_method_and_property_has_a_docstring() -> None:
    missing = [name for name, function in public_attributes() if not function.__doc__]
    assert missing == []

"""Every parser against mutated bytes: the CI size of ``python -m tools.torture fuzz``.

``corpus/`` holds inputs with different answers, and one for each bug that the fuzzer found (its note begins with
"raised", "wrong", "blocked" or "over", the failure that it caused).
"""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.directory.config import parse_toml
from kvfs.errors import ConfigError
from kvfs.format import segment as fmt
from kvfs.index import tables
from tools.torture.case import PROMPTS, get, namespace, open_store, put
from tools.torture.faults import lose_index
from tools.torture.fuzz import CORPUS, Pool, corpus_of, execute
from tools.torture.images import Image
from tools.torture.judge import Judge
from tools.torture.mutators import slot_offset
from tools.torture.parsers import SEED, TARGETS

EXECUTIONS = {
    "segment": 120,
    "index": 150,
    "store": 6,
    "identity": 150,
    "descriptor": 300,
    "hf_config": 150,
    "layout": 200,
}
ALLOCATED_BYTES_MAX = 16 << 20  # by one input, in addition to the input itself


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Exceptions in a store's threads are findings, and so are calls on the process's own files."""
    raised: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))
    with Path("/dev/zero").open("rb") as mine:  # gets one of the lowest numbers
        yield
        assert mine.read(1) == b"\0"
    assert raised == []


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_input_of_the_corpus_is_refused_or_verifies(name: str) -> None:
    corpus = corpus_of(name)
    assert corpus
    for note, image in corpus:
        tracemalloc.start()
        try:
            answer = execute(TARGETS[name], image)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert not answer.failure, f"{note}: {answer}"
        assert peak < ALLOCATED_BYTES_MAX, f"{note}: {peak} bytes"


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_changed_inputs_are_refused_or_verify(name: str) -> None:
    pool, chance = Pool(TARGETS[name], CORPUS), random.Random(name)
    for number in range(EXECUTIONS.get(name, 800)):
        answer = pool.step(chance)
        assert not answer.failure, f"execution {number}: {answer}"


@pytest.mark.parametrize("name", sorted(set(TARGETS) - {"store"}))
def test_what_was_never_valid_is_refused(name: str) -> None:
    target, chance = TARGETS[name], random.Random(name)
    for size in (0, 1, 7, 8, 16, 64, 160, 4096, 20480):
        for data in (bytes(size), b"\xff" * size, chance.randbytes(size)):
            assert not execute(target, Image.of(data)).failure


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_unchanged_inputs_are_accepted(name: str) -> None:
    """Otherwise no mutated input would pass the first check."""
    target = TARGETS[name]
    texts = [execute(target, image).text for image in target.seeds()]
    assert any(t.startswith(("accepted", "read", "StoreLocked", "0 accepted", "2", "False False")) for t in texts), (
        texts
    )


def segment_with(**changes: int) -> Image:
    """A segment without a seal whose last entry is forged, with a valid check word."""
    image = TARGETS["segment"].seeds()[1]
    at = slot_offset(4)  # of five records: two namespaces, then one page and two
    entry = fmt.parse_entry(image.read(at, fmt.ENTRY_BYTES), SEED)
    assert entry is not None and entry.kind == fmt.KIND_PART
    image.size = max(image.size, changes.pop("size", 0))
    image.write(at, fmt.pack_entry(entry._replace(**changes), SEED))
    return image


@pytest.mark.parametrize("name", ["segment", "store"])
@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 2**32 - 1},  # could not be raised when the segment was adopted: every put raised
        {"leaves": 2**36, "size": 2**37},  # too large for an index row: the rebuild raised, and was retried endlessly
        {"payload": 2**45, "size": 2**46},
        {"payload": 2**62, "size": 2**63 - 1},
        {"stored_bytes": 2**32 - 1, "size": 2**35},  # eviction would have allocated a buffer of that size
        {"expires": 2**32 - 1},
        {"chunk": 2**32 - 1},
        {"raw_bytes": 2**32 - 1},
    ],
    ids=str,
)
def test_extremes_of_a_record_neither_raise_nor_block(name: str, changes: dict[str, int]) -> None:
    assert not execute(TARGETS[name], segment_with(**changes)).failure


def test_a_damaged_ledger_is_rebuilt(tmp_path: Path) -> None:
    """It was taken for that of an empty store: new segments got the numbers of old ones, and the limit was exceeded."""
    judge = Judge()
    with open_store(tmp_path / "store") as store:
        put(namespace(store), PROMPTS.tokens(1, 20), judge)
        index = store._shared.c.index
        index.write(lambda s: s.txn.put(tables.LEDGER_KEY, b"damaged", db=s.db.meta), 5.0)
        generation = index.generation
        result = put(namespace(store), PROMPTS.tokens(2, 60), judge)
        assert result is not None and result.declined == 60
        store._shared.background.wake("rebuild")
        assert store.wait_ready(20.0) and index.generation != generation
        assert get(namespace(store), PROMPTS.tokens(1, 20), judge) == 20
        assert index.read(lambda s: s.check_ledger(), 5.0)
    assert not judge.failed, judge.notes


@pytest.mark.parametrize("key", ["a" + ".a" * 100_000 + " = 1", "[" + "a." * 100_000 + "a]", 'q."a"' + '."a"' * 60_000])
def test_a_key_of_many_parts_is_refused_at_once(key: str) -> None:
    """tomllib takes minutes for it."""
    with pytest.raises(ConfigError, match="dots"):
        parse_toml(b'capacity = "1GiB"\n' + key.encode(), "kvfs.toml")


def test_a_rebuild_removes_access_times_of_missing_segments(tmp_path: Path) -> None:
    judge, path = Judge(), tmp_path / "store"
    with open_store(path) as store:
        put(namespace(store), PROMPTS.tokens(1, 5), judge)
        assert get(namespace(store), PROMPTS.tokens(1, 5), judge) == 5
    (kept,) = (path / "run" / "use").iterdir()
    for name in ("ab" * 16, "z" * 32, "x"):
        (path / "run" / "use" / name).write_bytes(bytes(64))
    lose_index(path)
    with open_store(path) as store:
        assert store.wait_ready(20.0)
        store._shared._rebuilder.join(20.0)  # type: ignore[union-attr]
        assert list((path / "run" / "use").iterdir()) == [kept]
    assert not judge.failed, judge.notes


def test_a_parser_that_skips_its_check_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle checks the input itself."""
    monkeypatch.setattr(fmt, "_body", lambda data, size, seed=0: bytes(data[:size]) if len(data) >= size + 8 else None)
    pool, chance = Pool(TARGETS["entry"], CORPUS), random.Random(1)
    assert any(pool.step(chance).failure == "wrong" for _ in range(400))

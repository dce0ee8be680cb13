"""Changes of page rows, each on a few rows written by hand: what is claimed, named, moved, forgotten and swept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.index import ledger
from kvfs.index.ledger import Budget
from kvfs.index.lmdb_files import open_environment, open_tables
from kvfs.index.row_updates import (
    Moved,
    Named,
    Publish,
    RunKeys,
    Target,
    claim_run,
    forget,
    load,
    move,
    publish,
    save,
    sweep,
)
from kvfs.index.rows import CLAIM_SECONDS, Place, claim
from kvfs.index.session import Session
from kvfs.index.tables import DROPPED, Contents

NOW, LEAVES, STORED = 100, 2, 4096
DIGEST = b"d" * 32


def chunk(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def key(head: bytes) -> bytes:
    return head[:32] + bytes(8)


A, B, C, D = map(chunk, "ABCD")


def place(chunk_hash: bytes, seq: int = 0, segment: int = 1, **other: int) -> Place:
    fields = {"codec": 0, "flags": 0, "segment": segment, "block": 16 + seq, "stored_bytes": STORED + seq,
              "leaf": 9000 + LEAVES * seq, "seq": seq, "expires": 0}  # fmt: skip
    return Place(chunk_hash, seq.to_bytes(16, "little"), **{**fields, **other})


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """Segments 1 and 2 are active, 3 is dropped."""
    with open(tmp_path / "data.mdb", "xb") as file:
        env = open_environment(file.fileno(), 1 << 24)
    handles = open_tables(env, create=True)
    with env.begin(write=True) as txn:
        made = Session(txn, handles, "generation", NOW)
        wide = Budget(1 << 30, 1 << 30)
        for number in (1, 2, 3):
            assert ledger.new_segment(made, bytes([number]) * 16, b"o" * 16, bytes(16), 0, 1 << 20, wide) == number
        drop(made, 3)
        yield made
    env.close()


def drop(session: Session, number: int) -> None:
    row = session.segment(number)
    assert row is not None
    session.set_segment(number, row, row._replace(state=DROPPED))


def run(*hashes: bytes, first: int = 0, asked: list[bytes] | None = None) -> RunKeys:
    """A run; the rows that are looked up in it are noted in ``asked``."""

    def noting(head: bytes) -> bytes:
        if asked is not None:
            asked.append(head)
        return key(head)

    return RunKeys(first, hashes, noting, LEAVES)


def put(session: Session, head: bytes, **places: Place) -> None:
    """A row with places by slot: ``_0=...``."""
    save(session, key(head), {int(name[1:]): one for name, one in places.items()}, LEAVES)


# -- claims ------------------------------------------------------------------------------------


def test_chunks_are_claimed_in_the_row_of_their_run(session: Session) -> None:
    claims = claim_run(session, run(A, B, C, first=64), [0, 2], 2)
    assert claims == ([Target(64, 0, A, A), Target(66, 2, C, A)], 0, 0)
    expected = {0: claim(A, 2, NOW + CLAIM_SECONDS), 2: claim(C, 2, NOW + CLAIM_SECONDS)}
    assert load(session, key(A)) == expected and load(session, key(B)) == load(session, key(C)) == {}


def test_what_is_stored_or_being_written_is_not_claimed_again(session: Session) -> None:
    put(session, A, _0=place(A), _1=claim(B, 1, NOW + 1), _2=claim(C, 1, NOW), _3=place(D, 3, segment=3))
    claims = claim_run(session, run(A, B, C, D), [0, 1, 2, 3], 2)
    assert (claims.skipped, claims.in_flight) == (1, 1)
    assert [target.slot for target in claims.targets] == [2, 3], "an expired claim, and a page of a dropped segment"
    places = load(session, key(A))
    assert places[0] == place(A) and places[1] == claim(B, 1, NOW + 1)
    assert places[2] == claim(C, 2, NOW + CLAIM_SECONDS) and places[3] == claim(D, 2, NOW + CLAIM_SECONDS)


@pytest.mark.parametrize(
    "stale",
    [place(A, expires=NOW), place(A, codec=250), place(A, segment=3), claim(A, 1, NOW + CLAIM_SECONDS + 1),
     claim(A, 3, NOW + 1)],
)  # fmt: skip
def test_a_page_that_no_lookup_finds_is_stored_again(session: Session, stale: Place) -> None:
    put(session, A, _0=stale)
    assert claim_run(session, run(A), [0], 2) == ([Target(0, 0, A, A)], 0, 0)


def test_another_continuation_has_a_row_of_its_own(session: Session) -> None:
    put(session, A, _0=place(A), _1=place(B, 1))
    claims = claim_run(session, run(A, C, D), [1, 2], 2)
    assert claims.targets == [Target(1, 1, C, C), Target(2, 2, D, C)], "the second one follows the first"
    assert load(session, key(A)) == {0: place(A), 1: place(B, 1)} and set(load(session, key(C))) == {1, 2}


def test_a_run_that_is_asked_for_as_a_whole_is_read_up_to_its_first_gap(session: Session) -> None:
    asked: list[bytes] = []
    claim_run(session, run(A, B, C, D, asked=asked), [0, 1, 2, 3], 2)
    assert asked == [A, A], "read once, written once"
    put(session, A, _0=place(A), _1=place(B, 1))
    asked.clear()
    claim_run(session, run(A, B, C, D, asked=asked), [2, 3], 2)
    assert asked == [A, C, A], "the others are stored"


def test_where_some_chunks_are_neither_stored_nor_asked_for_all_rows_are_read(session: Session) -> None:
    put(session, D, _3=place(D, 3))
    asked: list[bytes] = []
    claims = claim_run(session, run(A, B, C, D, asked=asked), [3], 2)
    assert set(asked) == {A, B, C, D} and (claims.targets, claims.skipped) == ([], 1), "in a row behind the gap"
    put(session, D, _3=place(D, 3, segment=3))
    assert claim_run(session, run(A, B, C, D), [2], 2).targets == [Target(2, 2, C, A)]


# -- publishing --------------------------------------------------------------------------------


def test_of_two_records_of_a_page_the_first_stays(session: Session) -> None:
    first, second = place(A, 1), place(A, 2)
    assert publish(session, key, LEAVES, [Publish(A, 0, first), Publish(A, 1, place(B, 3))]) == Named(
        2, 2 * STORED + 1 + 3
    )
    assert publish(session, key, LEAVES, [Publish(A, 0, second)]) == Named(0, 0)
    assert load(session, key(A)) == {0: first, 1: place(B, 3)}
    drop(session, 1)
    again = place(A, 2, segment=2)
    assert publish(session, key, LEAVES, [Publish(A, 0, again)]) == Named(1, STORED + 2)
    assert load(session, key(A)) == {0: again}, "what was of the dropped segment is gone"


@pytest.mark.parametrize("there", [place(B, 1), claim(B, 1, NOW + 1)])
def test_a_record_whose_slot_went_to_another_continuation_goes_to_its_own_row(session: Session, there: Place) -> None:
    put(session, A, _1=there)
    records = [Publish(A, 1, place(C, 2)), Publish(A, 1, place(C, 4))]
    assert publish(session, key, LEAVES, records) == Named(1, STORED + 2)
    assert load(session, key(A)) == {1: there} and load(session, key(C)) == {1: place(C, 2)}


@pytest.mark.parametrize("there", [claim(B, 1, NOW), place(B, 1, expires=NOW), place(B, 1, codec=250)])
def test_a_slot_whose_page_no_lookup_finds_is_taken(session: Session, there: Place) -> None:
    put(session, A, _1=there)
    assert publish(session, key, LEAVES, [Publish(A, 1, place(C, 2))]) == Named(1, STORED + 2)
    assert load(session, key(A)) == {1: place(C, 2)}


# -- moving ------------------------------------------------------------------------------------


def test_copies_replace_their_sources_where_these_are_named(session: Session) -> None:
    put(session, A, _0=place(A, 1), _1=place(B, 2), _2=claim(C, 1, NOW + 1))
    put(session, D, _3=place(D, 4))
    copies = [
        Moved(1, 1, A, 0, place(A, 11, segment=2)),
        Moved(1, 9, A, 1, place(B, 12, segment=2)),  # another record
        Moved(2, 2, A, 1, place(B, 13, segment=2)),  # of another segment
        Moved(1, 0, A, 2, place(C, 14, segment=2)),  # that is being written
        Moved(1, 4, A, 3, place(D, 15, segment=2)),  # in a row of its own
        Moved(1, 5, A, 5, place(D, 16, segment=2)),  # of no slot
    ]
    named = move(session, key, LEAVES, copies)
    assert [(m.seq, old) for m, old in named] == [(1, place(A, 1)), (4, place(D, 4))]
    assert load(session, key(A)) == {0: place(A, 11, segment=2), 1: place(B, 2), 2: claim(C, 1, NOW + 1)}
    assert load(session, key(D)) == {3: place(D, 15, segment=2)}
    assert move(session, key, LEAVES, copies) == []


def test_a_copy_of_another_page_with_the_same_numbers_is_not_named(session: Session) -> None:
    put(session, A, _0=place(A, 1))
    assert move(session, key, LEAVES, [Moved(1, 1, A, 0, place(B, 11, segment=2))]) == []
    assert load(session, key(A)) == {0: place(A, 1)}


# -- forgetting --------------------------------------------------------------------------------


def test_wrong_records_leave_their_rows_and_counts(session: Session) -> None:
    put(session, A, _0=place(A, 1), _1=place(B, 2), _2=claim(C, 1, NOW + 1))
    put(session, D, _0=place(D, 3, segment=2))
    session.add_contents(1, DIGEST, 5, 100_000)
    session.add_contents(2, DIGEST, 5, 100_000)
    wrong = {(1, 2): DIGEST, (2, 3): b"", (1, 0): DIGEST, (9, 9): DIGEST}
    assert forget(session, [key(A), key(B), key(D)], wrong) == {(1, 2), (2, 3)}
    assert load(session, key(A)) == {0: place(A, 1), 2: claim(C, 1, NOW + 1)}, "a claim has no record"
    assert session.txn.get(key(D), db=session.db.pages) is None
    counts = [Contents(1, DIGEST, 4, 100_000 - STORED - 2), Contents(2, DIGEST, 5, 100_000)]
    assert session.contents(b"", 9) == (counts, None), "of an unknown namespace nothing is counted"
    assert forget(session, [key(A)], wrong) == set()


# -- sweeping ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [False, True])
def test_a_sweep_leaves_what_may_be_found_or_published(session: Session, pack: bool) -> None:
    kept = {0: place(A), 1: claim(B, 1, NOW), 2: place(C, 2, expires=NOW + 1), 3: place(D, 3, codec=250)}
    save(session, key(A), {**kept, 4: place(D, 4, expires=NOW)}, LEAVES)
    put(session, B, _0=place(B, 5))
    session.put_row(key(C), b"damaged")
    save(session, key(D), {0: place(D, 6, segment=2)}, LEAVES)
    drop(session, 2)
    assert sweep(session, b"", 99, pack=pack) == (None, 3), "one is shorter, one damaged, one of a dropped segment"
    assert load(session, key(A)) == kept and load(session, key(B)) == {0: place(B, 5)}
    assert [session.txn.get(key(one), db=session.db.pages) for one in (C, D)] == [None, None]
    assert sweep(session, b"", 99, pack=pack) == (None, 0)


@pytest.mark.parametrize("pack", [False, True])
def test_a_sweep_goes_on_where_it_ended(session: Session, pack: bool) -> None:
    rows = sorted(key(one) for one in (A, B, C, D))
    for one in (A, B, C, D):
        put(session, one, _0=place(one))
    assert sweep(session, b"", 4, pack=pack) == (None, 0)
    assert sweep(session, b"", 3, pack=pack) == (rows[3], 0)
    assert sweep(session, rows[3], 1, pack=pack) == (None, 0)
    assert sweep(session, rows[3] + b"\0", 1, pack=pack) == (None, 0)
    session.put_row(rows[1], b"damaged")
    seen, start = [], b""
    while True:
        following, changed = sweep(session, start, 1, pack=pack)
        seen.append(changed)
        if following is None:
            break
        start = following
    assert seen == [0, 1, 0, 0] and [k for k, _ in session.txn.cursor(db=session.db.pages)] == [rows[0], *rows[2:]]


def test_a_packing_sweep_writes_all_rows_again(session: Session) -> None:
    for one in (A, B):
        put(session, one, _0=place(one))
    written: list[bytes] = []
    original: Callable[[bytes, bytes], None] = session.put_row

    class Noting(Session):
        def put_row(self, key: bytes, value: bytes) -> None:
            written.append(key)
            original(key, value)

    noting = Noting(session.txn, session.db, session.generation, NOW)
    assert sweep(noting, b"", 99) == (None, 0) and written == []
    assert sweep(noting, b"", 99, pack=True) == (None, 0) and sorted(written) == sorted([key(A), key(B)])


def test_a_row_is_written_without_dropped_segments_and_removed_if_nothing_is_left(session: Session) -> None:
    save(session, key(A), {0: place(A, segment=3), 1: place(B, 1), 2: claim(C, 3, NOW + 1)}, LEAVES)
    assert load(session, key(A)) == {1: place(B, 1)}
    save(session, key(A), {0: place(A, segment=3)}, LEAVES)
    assert session.txn.get(key(A), db=session.db.pages) is None

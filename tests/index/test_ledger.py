"""The life of a segment in the ledger: what each step leaves of its row, of the charge and of the counters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

import kvfs
from kvfs.directory.config import make_settings, quota_id
from kvfs.directory.liveness import NO_OWNER
from kvfs.format import segment as fmt
from kvfs.index import ledger, tables
from kvfs.index.ledger import ANY_CLASS, EPOCH_MAX, Budget, NeedSpaceError, StaleWriterError
from kvfs.index.lmdb_files import open_environment, open_tables
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, DROPPED, SEALED, Contents
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of

SEGMENT_ID, OWNER, OTHER = b"s" * 16, b"o" * 16, b"p" * 16
GENERATION = "generation"
MIB = 1 << 20
LIMITS = Budget(64 * MIB, 64 * MIB)


class Store:
    """An index with transactions that each check the ledger at their end."""

    def __init__(self, env: lmdb.Environment) -> None:
        self._env = env
        self._tables = open_tables(env, create=True)

    @contextmanager
    def transaction(self, generation: str = GENERATION) -> Iterator[Session]:
        with self._env.begin(write=True) as txn:
            session = Session(txn, self._tables, generation, 0)
            yield session
            assert session.check_ledger()

    def new_segment(self) -> int:
        with self.transaction() as session:
            return ledger.new_segment(session, SEGMENT_ID, OWNER, ANY_CLASS, 0, MIB, LIMITS)

    def states(self) -> dict[int, int]:
        with self.transaction() as session:
            return {number: row.state for number, row in session.segments()}


def totals(session: Session) -> tuple[int, int]:
    """(bytes charged, segments dropped)"""
    return session.ledger().used, session.ledger().dropped


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open(tmp_path / "data.mdb", "xb") as file:
        env = open_environment(file.fileno(), 1 << 24)
    yield Store(env)
    env.close()


@pytest.mark.parametrize("records", [0, 1, 100, 100_000])
def test_a_segment_is_charged_for_its_access_times_and_a_purge_mark(records: int) -> None:
    mark = fmt.pack_purge_mark(fmt.PurgeMark(SEGMENT_ID, 0, 1, bytes(records // 8 + 1)))
    assert ledger.charge(MIB, records) >= MIB + fmt.align(8 * records) + fmt.align(len(mark)) + fmt.BLOCK


def test_a_segment_is_charged_from_its_row_to_its_reclaim(store: Store) -> None:
    number = store.new_segment()
    with store.transaction() as session:
        row = ledger.own_segment(session, number, OWNER, GENERATION)
        assert session.ledger().used == ledger.charge(MIB, 0)
        row = ledger.reserve(session, number, row, 2 * MIB, 100, LIMITS)
        session.set_segment(number, row, row._replace(records=100))
    with store.transaction() as session:
        ledger.seal(session, number, OWNER, GENERATION, 3 * fmt.BLOCK)
        sealed = session.segment(number)
        assert sealed is not None and (sealed.state, sealed.owner) == (SEALED, NO_OWNER)
        assert session.ledger().used == ledger.charge(3 * fmt.BLOCK, 100)
    with store.transaction() as session:
        assert ledger.mark_dropped(session, number, OTHER, b"another segment.") is None
        assert ledger.mark_dropped(session, number, OTHER, SEGMENT_ID)
        assert totals(session) == (ledger.charge(3 * fmt.BLOCK, 100), 1) and not session.segment_alive(number)
    with store.transaction() as session:
        ledger.reclaim(session, number, b"another segment.")
        assert session.ledger().dropped == 1
        ledger.reclaim(session, number, SEGMENT_ID)
        assert totals(session) == (0, 0) and not session.segments()


def test_only_the_owner_under_its_generation_takes_steps(store: Store) -> None:
    number = store.new_segment()
    for owner, generation in ((OTHER, GENERATION), (OWNER, "another one")):
        with store.transaction(GENERATION) as session, pytest.raises(StaleWriterError):
            ledger.seal(session, number, owner, generation, MIB)
    with store.transaction("another one") as session:
        ledger.take_step(ledger.mark_dropped, number, OWNER, GENERATION, session)
    assert store.states() == {number: ACTIVE}


def test_an_adopter_takes_a_released_segment_with_a_higher_epoch(store: Store) -> None:
    number = store.new_segment()
    with store.transaction() as session:
        ledger.release_ownership(session, number, OWNER, GENERATION, fmt.FIRST_PAYLOAD)
        released = session.segment(number)
        assert released is not None and (released.state, released.owner) == (ACTIVE, NO_OWNER)
    with store.transaction() as session:
        taken = ledger.adopt(session, number, released, OTHER)
        assert taken == released._replace(owner=OTHER, epoch=released.epoch + 1) == session.segment(number)
        assert ledger.adopt(session, number, released, OWNER) is None, "another process was first"


def test_a_segment_whose_epoch_cannot_be_raised_is_sealed(store: Store) -> None:
    number = store.new_segment()
    with store.transaction() as session:
        row = ledger.own_segment(session, number, OWNER, GENERATION)
        last = row._replace(epoch=EPOCH_MAX)
        session.set_segment(number, row, last)
        assert ledger.adopt(session, number, last, OTHER) is None
    assert store.states() == {number: SEALED}


@pytest.mark.parametrize(("records", "state"), [(0, DROPPED), (3, SEALED)])
def test_a_row_without_a_writer_is_dropped_if_it_names_nothing(store: Store, records: int, state: int) -> None:
    number = store.new_segment()
    with store.transaction() as session:
        row = ledger.own_segment(session, number, OWNER, GENERATION)
        session.set_segment(number, row, row._replace(records=records))
        ledger.abandon_stale(session, number, OTHER)
        assert session.segments_in(ACTIVE)
        ledger.abandon_stale(session, number, OWNER)
    assert store.states() == {number: state}


def test_a_reservation_that_is_refused_changes_nothing(store: Store) -> None:
    number = store.new_segment()
    with store.transaction() as session, pytest.raises(NeedSpaceError) as raised:
        row = ledger.own_segment(session, number, OWNER, GENERATION)
        ledger.reserve(session, number, row, 65 * MIB, 0, LIMITS)
    assert raised.value.missing == ledger.charge(65 * MIB, 0) - LIMITS.limit
    with store.transaction() as session:
        assert session.ledger().used == ledger.charge(MIB, 0)


def test_a_sweep_does_not_change_the_count_of_dropped_segments(tmp_path: Path) -> None:
    """It lowered that count in place of the count of unswept segments: reclaiming the segment then raised."""
    with kvfs.open(tmp_path / "store", capacity="16MiB") as opened:
        core, ns = opened._shared, opened.namespace("m", tiny(), revision="r1")
        core.background.stop()
        ns.put(tokens_of(1, 4), seeded(1, 4 * TINY_BYTES))
        core.services().active.finish_all()
        index, reclaimer = core.c.index, core.services().evictor.reclaimer
        ((number, row),) = index.read(lambda s: s.segments(), 5.0)
        with ns.match(tokens_of(1, 4)) as match:
            assert match.chunks == 4
            assert not reclaimer.drop(number), "the match holds its segment"
            reclaimer.sweep_all()
            assert index.read(lambda s: (s.ledger().dropped, s.ledger().unswept), 5.0) == (1, 0)
        assert reclaimer.reclaim_dropped() == row.allocated
        assert index.read(lambda s: s.check_ledger() and not s.ledger().used, 5.0)


@pytest.mark.parametrize(
    ("owner", "evictor", "cap"),
    [("capped", False, 4 * MIB), ("capped", True, 4 * MIB + 2 * MIB), ("open", False, None), ("open", True, None),
     ("unknown", True, None), (None, True, None)],
)  # fmt: skip
def test_eviction_may_use_the_reserve_beyond_the_limits(owner: str | None, evictor: bool, cap: int | None) -> None:
    """Copies are charged while their victim still is: also in a quota at its cap, or one that has none."""
    quotas = {"capped": kvfs.Quota(cap_bytes=4 * MIB), "open": kvfs.Quota()}
    settings = make_settings("64MiB", segment="1MiB", index="4MiB", quotas=quotas)
    class_id = quota_id(owner) + bytes(8) if owner else ANY_CLASS
    found = ledger.budget(settings, class_id, evictor=evictor)
    assert found.cap == cap
    assert found.limit == settings.segments_bytes_max - (0 if evictor else 2 * MIB)
    assert (found.index_limit == 4 * MIB) is evictor


def test_damaged_counts_of_a_namespace_are_listed_as_unknown(store: Store) -> None:
    """They are no reason to forget that the segment holds its pages."""
    with store.transaction() as session:
        session.add_contents(7, b"d" * 32, 3, 300)
        ((key, _),) = ((k, v) for k, v in session.txn.cursor(db=session.db.meta) if b"d" * 32 in bytes(k))
        session.txn.put(key, b"damaged", db=session.db.meta)
        session.add_contents(7, b"d" * 32, -3, -300)
        assert tables.read_contents(session.txn, session.db.meta, b"", 9) == ([(7, b"d" * 32, 0, 0)], None)


def test_contents_are_read_in_slices(store: Store) -> None:
    number, digests = store.new_segment(), [bytes([n]) * 32 for n in range(5)]
    with store.transaction() as session:
        for n, digest in enumerate(digests):
            session.add_contents(number, digest, n + 1, 100 * n)
        found, after = list[Contents](), b""
        for _ in range(3):  # of two, two and one
            rows, following = session.contents(after, 2)
            found += rows
            after = following or after
        assert following is None
        for digest in digests:
            session.add_contents(number, digest, -10, 0)
    assert [(c.digest, c.records, c.stored_bytes) for c in found] == [
        (d, n + 1, 100 * n) for n, d in enumerate(digests)
    ]

"""The small tables of the index: exact amounts, limits to the byte, and neighbours that a step leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from kvfs.directory.config import Quota, make_settings, quota_id
from kvfs.directory.liveness import NO_OWNER
from kvfs.errors import IndexUnavailableError
from kvfs.format import segment as fmt
from kvfs.index import ledger, tables
from kvfs.index.ledger import ANY_CLASS, Budget, NeedSpaceError, StaleWriterError
from kvfs.index.lmdb_files import open_environment, open_tables
from kvfs.index.rows import CLAIM, Extent
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, DROPPED, SEALED, Contents, Ledger, SegmentRow

MIB = 1 << 20
OWNER, OTHER, GENERATION = b"o" * 16, b"p" * 16, "generation"
QUOTA = quota_id("chat")
CLASS = QUOTA + bytes(8)
WIDE = Budget(64 * MIB, 64 * MIB)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with open(tmp_path / "data.mdb", "xb") as file:
        env = open_environment(file.fileno(), 1 << 24)
    handles = open_tables(env, create=True)
    with env.begin(write=True) as txn:
        session = Session(txn, handles, GENERATION, 100)
        yield session
        assert session.check_ledger()
    env.close()


def new(session: Session, number: int = 1, *, allocated: int = MIB, class_id: bytes = CLASS) -> int:
    return ledger.new_segment(session, bytes([number]) * 16, OWNER, class_id, 0, allocated, WIDE)


def row_of(session: Session, number: int) -> SegmentRow:
    row = session.segment(number)
    assert row is not None
    return row


@pytest.mark.parametrize(
    ("records", "small"),
    [(0, 3), (511, 3), (512, 4), (513, 4), (1023, 4), (1024, 5), (32_255, 65), (32_256, 66), (32_264, 67)],
)
def test_a_charge_is_the_file_and_whole_blocks(records: int, small: int) -> None:
    """A stamp of eight bytes for each record and one byte, a mark of a bit for each and 64 bytes, and a block."""
    assert ledger.charge(MIB, records) == MIB + small * 4096


def test_the_rows_of_new_segments_and_of_files_without_one(session: Session) -> None:
    assert new(session) == 1
    charged = MIB + 3 * 4096
    assert session.segment(1) == SegmentRow(
        b"\1" * 16, OWNER, CLASS, ACTIVE, 0, 1, 0, charged, fmt.FIRST_PAYLOAD, fmt.FIRST_TABLE, 0
    )
    ledger.charge_file(session, b"f" * 16, "another generation", DROPPED, MIB)
    assert session.segment(2) is None
    ledger.charge_file(session, b"f" * 16, GENERATION, DROPPED, MIB)
    assert session.segment(2) == SegmentRow(
        b"f" * 16, NO_OWNER, ANY_CLASS, DROPPED, 0, 1, 0, charged, fmt.FIRST_PAYLOAD, fmt.FIRST_TABLE, 0
    )
    assert session.ledger() == Ledger(2 * charged, 3, 1, 0)
    assert (session.quota_used(QUOTA), session.quota_used(bytes(8))) == (charged, 0), "no quota is counted for none"


@pytest.mark.parametrize("short", [0, 1])
def test_growth_is_allowed_up_to_each_limit_to_the_byte(session: Session, short: int) -> None:
    first, second = new(session), new(session, 2)
    row, cost = row_of(session, first), ledger.charge(2 * MIB, 9)
    used = session.ledger().used + cost - row.allocated
    assert session.quota_used(QUOTA) == used - cost + row.allocated, "both segments are the quota's"
    index = session.used_bytes()
    for limits, owner in (
        (Budget(used - short, index, QUOTA, used), b""), (Budget(used, index, QUOTA, used - short), QUOTA)
    ):  # fmt: skip
        if short:
            with pytest.raises(NeedSpaceError, match=r"^1 bytes missing$") as raised:
                ledger.reserve(session, first, row, 2 * MIB, 9, limits)
            assert (raised.value.missing, raised.value.owner) == (1, owner)
            with pytest.raises(NeedSpaceError):
                ledger.new_segment(session, b"n" * 16, OWNER, CLASS, 0, 2 * MIB, limits)
        else:
            grown = ledger.reserve(session, first, row, 2 * MIB, 9, limits)
            session.set_segment(first, grown, row)
            assert grown == row._replace(allocated=cost)
    with pytest.raises(IndexUnavailableError, match="index full"):
        ledger.reserve(session, second, row_of(session, second), MIB, 0, Budget(64 * MIB, index - 1))
    # what does not grow needs no room
    ledger.reserve(session, second, row_of(session, second), MIB // 2, 0, Budget(0, index, QUOTA, 0))
    assert row_of(session, second).allocated == ledger.charge(MIB, 0), "a charge is not lowered by a reservation"


@pytest.mark.parametrize(
    ("fresh", "segment", "page"),
    [(1, 256, 1024), (64, 256, 1024), (65, 260, 1024), (256, 1024, 1024), (257, 1024, 1024), (4096, 1024, 1024)],
)
def test_large_records_may_fill_a_sixteenth_of_the_capacity(fresh: int, segment: int, page: int) -> None:
    settings = make_settings("16MiB", segment="256KiB")
    assert ledger.segment_limit(settings, fresh * 1024) == segment * 1024
    assert ledger.page_limit(settings) == page * 1024
    wide = make_settings("64MiB", segment="7MiB")
    assert ledger.page_limit(wide) == ledger.segment_limit(wide, 64 * MIB) == 7 * MIB


def test_a_writers_index_may_be_full_to_85_percent() -> None:
    settings = make_settings("64MiB", segment="1MiB", index="4MiB", quotas={"chat": Quota(cap_bytes=MIB)})
    assert ledger.budget(settings, CLASS) == Budget(settings.segments_bytes_max - 2 * MIB, 3_565_158, QUOTA, MIB)
    assert ledger.budget(settings) == Budget(settings.segments_bytes_max - 2 * MIB, 3_565_158, bytes(8), None)


def test_steps_of_the_owner_need_its_active_segment(session: Session) -> None:
    number = new(session)
    row = row_of(session, number)
    wrong = (
        (number, OTHER, GENERATION), (number, OWNER, "another"), (number + 1, OWNER, GENERATION)
    )  # fmt: skip
    for step in (ledger.shrink, ledger.release_ownership, ledger.seal):
        for at, owner, generation in wrong:
            with pytest.raises(StaleWriterError):
                step(session, at, owner, generation, MIB)
    ledger.close_for_appends(session, number, OTHER)
    ledger.close_for_appends(session, number + 1, OWNER)
    ledger.abandon_stale(session, number + 1, OWNER)
    assert ledger.mark_dropped(session, number + 1, OWNER) is None
    ledger.reclaim(session, number + 1, row.segment_id)
    ledger.reclaim(session, number, row.segment_id)  # it is active
    ledger.take_step(ledger.mark_dropped, number, OWNER, "another", session)
    assert row_of(session, number) == row
    ledger.close_for_appends(session, number, OWNER)
    closed = row_of(session, number)
    assert closed == row._replace(state=SEALED, owner=NO_OWNER)
    for step in (ledger.shrink, ledger.release_ownership, ledger.seal):
        with pytest.raises(StaleWriterError):
            step(session, number, NO_OWNER, GENERATION, MIB)
    ledger.close_for_appends(session, number, NO_OWNER)
    assert ledger.mark_dropped(session, number, OTHER) == closed._replace(state=DROPPED, owner=OTHER)
    assert ledger.mark_dropped(session, number, OWNER) == closed._replace(state=DROPPED, owner=OTHER)
    ledger.close_for_appends(session, number, OTHER)
    assert session.ledger() == Ledger(row.allocated, 2, 1, 1)


@pytest.mark.parametrize(
    ("step", "state", "owner"),
    [(ledger.shrink, ACTIVE, OWNER), (ledger.release_ownership, ACTIVE, NO_OWNER), (ledger.seal, SEALED, NO_OWNER)],
)
def test_a_segment_is_charged_for_what_it_was_trimmed_to(
    session: Session, step: object, state: int, owner: bytes
) -> None:
    number, other = new(session), new(session, 2, class_id=ANY_CLASS)
    row = row_of(session, number)
    session.set_segment(number, row, row._replace(records=600))
    step(session, number, OWNER, GENERATION, 5 * 4096)  # type: ignore[operator]
    charged = ledger.charge(5 * 4096, 600)
    assert row_of(session, number) == row._replace(state=state, owner=owner, records=600, allocated=charged)
    assert session.quota_used(QUOTA) == charged
    assert session.ledger().used == charged + row_of(session, other).allocated


def test_active_and_dropped_segments_are_listed_each_by_itself(session: Session) -> None:
    numbers = [new(session, n) for n in range(1, 7)]
    ledger.seal(session, numbers[1], OWNER, GENERATION, MIB)
    for number in numbers[2:4]:
        ledger.mark_dropped(session, number, OWNER)
    assert [n for n, _ in session.segments_in(ACTIVE)] == [1, 5, 6]
    assert [n for n, _ in session.segments_in(DROPPED)] == [3, 4]
    assert [(n, row.state) for n, row in session.segments()] == [(1, 1), (2, 2), (3, 3), (4, 3), (5, 1), (6, 1)]
    assert session.ledger()[1:] == (7, 2, 2)
    session.swept(1)
    assert session.ledger().unswept == 1
    session.swept(5)
    assert session.ledger().unswept == 0
    for number in (3, 5):
        session.delete_segment(number, row_of(session, number))
    assert [n for n, _ in session.segments_in(ACTIVE)] == [1, 6]
    assert [n for n, _ in session.segments_in(DROPPED)] == [4]
    assert session.ledger() == Ledger(4 * ledger.charge(MIB, 0), 7, 1, 0)
    assert session.quota_used(QUOTA) == 4 * ledger.charge(MIB, 0)


def test_a_number_is_never_used_twice(session: Session) -> None:
    number = new(session)
    session.delete_segment(number, row_of(session, number))
    assert session.quota_used(QUOTA) == 0
    assert session.txn.get(b"quota/" + QUOTA, db=session.db.meta) is None, "a quota that uses nothing has no row"
    assert new(session) == number + 1
    tables.put_ledger(session.txn, session.db.meta, session.ledger()._replace(next_segment=number + 1))
    with pytest.raises(lmdb.CorruptedError, match="ledger row is damaged"):
        new(session)


def test_sums_that_contradict_the_rows_are_damage(session: Session) -> None:
    meta = session.db.meta
    assert session.ledger() == Ledger(0, 1, 0, 0)
    for wrong in (Ledger(-1, 1, 0, 0), Ledger(0, 1, -1, 0), Ledger(1 << 64, 1, 0, 0)):
        with pytest.raises(lmdb.CorruptedError, match="ledger row is damaged"):
            tables.put_ledger(session.txn, meta, wrong)
    number = new(session)
    good = session.ledger()
    for change in ({"used": good.used + 1}, {"dropped": 1}):
        tables.put_ledger(session.txn, meta, good._replace(**change))
        assert not session.check_ledger()
    session.txn.put(b"ledger", b"damaged", db=meta)
    with pytest.raises(lmdb.CorruptedError):
        session.ledger()
    tables.put_ledger(session.txn, meta, good)
    packed = bytes(session.txn.get(tables.segment_key(number), db=session.db.segments))
    for at in (0, len(packed) - 1):
        torn = bytearray(packed)
        torn[at] ^= 1
        session.txn.put(tables.segment_key(number), bytes(torn), db=session.db.segments)
        assert session.segment(number) is None and session.segments() == [], "a damaged row is none"
    session.txn.put(tables.segment_key(number), packed, db=session.db.segments)


def test_contents_are_counted_for_each_segment_and_namespace(session: Session) -> None:
    one, two = b"1" * 32, b"2" * 32
    first, second = new(session), new(session, 2)
    for segment, digest, records, nbytes in (
        (first, one, 2, 200), (first, one, 3, 300), (first, two, 1, 10), (second, one, 4, 40), (second, two, 0, 99),
    ):  # fmt: skip
        session.add_contents(segment, digest, records, nbytes)
    listed = [Contents(first, one, 5, 500), Contents(first, two, 1, 10), Contents(second, one, 4, 40)]
    assert session.contents(b"", 9) == (listed, None)
    assert session.has_contents(second, one) and not session.has_contents(second, two)
    session.add_contents(first, one, -4, -600)
    session.add_contents(first, two, -1, -10)
    assert session.contents(b"", 9) == ([Contents(first, one, 1, 0), Contents(second, one, 4, 40)], None)
    slices, after = [], b""
    while True:
        rows, following = session.contents(after, 1)
        slices.append(len(rows))
        if following is None:
            break
        after = following
    assert slices == [1, 1, 0]
    session.delete_segment(first, row_of(session, first))
    assert session.contents(b"", 9) == ([Contents(second, one, 4, 40)], None), "those of the next segment stay"
    session.txn.put(b"contents/short", b"", db=session.db.meta)
    session.txn.put(b"contenu", b"", db=session.db.meta)
    assert session.contents(b"", 9) == ([Contents(second, one, 4, 40)], None)


def test_namespaces_have_parts_by_group(session: Session) -> None:
    one, two = b"1" * 32, b"2" * 32
    for digest, group, part in ((one, 0, b"b"), (one, 0, b"a"), (one, 1, b"c"), (two, 0, b"d"), (one, 0, b"a")):
        session.put_namespace(digest, digest[:4], group, part)
    session.put_namespace(one, b"another", 0, b"a")
    assert session.parts(one, 0) == [b"a", b"b"] and session.parts(one, 1) == [b"c"] and session.parts(two, 1) == []
    assert session.namespaces(b"", 99) == ([(one, b"1111"), (two, b"2222")], None)
    assert session.namespaces(b"", 1) == ([(one, b"1111")], one)
    assert session.namespaces(one, 4) == ([(two, b"2222")], two)
    assert session.namespaces(two + b"\0\0d", 4) == ([], None)
    session.delete_namespace(one)
    assert session.namespaces(b"", 99) == ([(two, b"2222")], None) and session.parts(one, 0) == []
    session.delete_namespace(one)
    for n in range(257):
        session.put_namespace(two, b"", 7, n.to_bytes(2, "big"))
    assert session.parts(two, 7) == [n.to_bytes(2, "big") for n in range(256)]


@pytest.mark.parametrize(
    ("changes", "live"),
    [({}, True), ({"expires": 101}, True), ({"expires": 100}, False), ({"expires": 99}, False), ({"codec": 3}, False),
     ({"codec": 2}, True), ({"flags": CLAIM}, False), ({"segment": 9}, False)],
)  # fmt: skip
def test_what_may_be_read_is_published_known_and_not_expired(
    session: Session, changes: dict[str, int], live: bool
) -> None:
    number = new(session)
    extent = Extent(0, 1, 0, 0, number, 4, 1, 100, 512, 0, 0)._replace(**changes)
    assert session.is_live(extent) is live
    assert session.live_in(extent) == (b"\1" * 16 if live else None)
    assert session.tails.get(number, 0) == (0 if not live else fmt.FIRST_PAYLOAD)
    ledger.mark_dropped(session, number, OWNER)
    assert not session.is_live(extent) and not session.segment_alive(number)


@pytest.mark.parametrize(("expires", "holds"), [(99, False), (100, False), (101, True), (105, True), (106, False)])
def test_a_claim_holds_for_its_five_seconds_while_its_segment_is_active(
    session: Session, expires: int, holds: bool
) -> None:
    number = new(session)
    claim = Extent(0, 1, 0, CLAIM, number, 0, 0, 0, 0, 0, expires)
    assert session.claim_holds(claim) is holds
    assert not session.claim_holds(claim._replace(segment=number + 1))
    ledger.close_for_appends(session, number, OWNER)
    assert not session.claim_holds(claim)


def test_the_fullness_of_an_index_is_estimated_from_its_rows(session: Session) -> None:
    assert session.fullness() == 1.0, "of an empty one"
    for n in range(300):
        session.put_row(n.to_bytes(32, "big"), bytes(100))
    stat = session.txn.stat(session.db.pages)
    assert session.fullness() == pytest.approx(300 * (32 + 100 + 10) / (stat["leaf_pages"] * 4096))
    pages = sum(session.txn.stat(db)[kind] for db in session.db for kind in PAGES)
    assert session.used_bytes() == pages * 4096
    assert session.keys_there([bytes(32), b"x" * 32]) == [bytes(32)]
    session.delete_row(bytes(32))
    assert session.keys_there([bytes(32)]) == []


PAGES = ("branch_pages", "leaf_pages", "overflow_pages")

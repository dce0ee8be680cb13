"""Rows of the index, and prompts that share a beginning: a model against a real LMDB environment."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvfs.format.checksums import checksum
from kvfs.index import rows
from kvfs.index.lmdb_files import open_environment, open_tables
from kvfs.index.row_updates import Publish, RunKeys, Target, claim_run, forget, publish, sweep
from kvfs.index.rows import CLAIM, CLAIM_SECONDS, RUN, Place, checked_row, claim, pack_row, parse_row
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, DROPPED, SegmentRow
from kvfs.lookup.search import GroupLookup, Prompt, prefix_length
from kvfs.pages.chunk_hash import page_key
from kvfs.pages.layout import Cell, Group, Need

KEY = bytes(range(40))
GROUP = Group("full", (0,), 1, Cell("opaque", 16), Need.all(), 16)
DIGEST = b"\x07" * 32
LEAVES = GROUP.leaves(GROUP.full)

u32 = st.integers(0, 2**32 - 1)


# ---------------------------------------------------------------- one row


def place(seq: int, segment: int = 1, block: int | None = None, leaves: int = 4, **other: Any) -> Place:
    """A record at the offset at which an append would write it."""
    fields = {
        "chunk_hash": hashlib.sha256(bytes([seq % 256])).digest(), "root": hashlib.md5(bytes([seq % 256])).digest(),
        "codec": 0, "flags": 0, "segment": segment, "block": 16 + 3 * seq if block is None else block,
        "stored_bytes": 12288, "leaf": 9000 + leaves * seq, "seq": seq, "expires": 0,
    }  # fmt: skip
    return Place(**{**fields, **other})


any_place = st.builds(
    Place, st.binary(min_size=32, max_size=32), st.binary(min_size=16, max_size=16), st.integers(0, 255),
    st.sampled_from([0, 2, 4]), st.integers(0, 3), u32, u32, u32, st.integers(0, 2**31), st.integers(0, 5),
)  # fmt: skip
neighbours = st.builds(
    place, st.integers(0, RUN), segment=st.integers(1, 2), codec=st.integers(0, 1), expires=st.integers(0, 1)
)
slots = st.integers(0, RUN - 1)


@given(st.dictionaries(slots, any_place | neighbours, min_size=1), st.integers(1, 2**20))
def test_a_row_survives_the_index(places: dict[int, Place], leaves: int) -> None:
    value = pack_row(KEY, places, leaves)
    row = parse_row(KEY, value)
    assert row is not None and (row.leaves, row.present) == (leaves, sum(1 << j for j in places))
    assert dict(row.places()) == places
    assert dict(checked_row(value).places()) == places


@given(st.dictionaries(slots, neighbours, min_size=2))
def test_stretches_of_neighbours_survive_the_index(places: dict[int, Place]) -> None:
    row = parse_row(KEY, pack_row(KEY, places, 4))
    assert row is not None and dict(row.places()) == places


def test_chunks_stored_together_share_an_extent() -> None:
    row = parse_row(KEY, pack_row(KEY, {j: place(j) for j in range(RUN)}, 4))
    assert row is not None and len(row.extents) == 1
    assert (row.extents[0].first, row.extents[0].chunks, row.extents[0].stride) == (0, RUN, 3)


@pytest.mark.parametrize(
    ("changed", "extents"),
    [
        ({"segment": 2}, 3),
        ({"codec": 1}, 3),
        ({"flags": 4}, 3),
        ({"expires": 9}, 3),
        ({"stored_bytes": 4096}, 3),
        ({"seq": 99}, 3),
        ({"leaf": 7}, 3),
        ({"block": 4000}, 3),
        ({"block": 1}, 3),  # before its neighbour: strides are positive
        ({"root": bytes(16), "chunk_hash": bytes(32)}, 1),
    ],
)
def test_a_place_that_differs_gets_an_extent_of_its_own(changed: dict[str, Any], extents: int) -> None:
    places = {j: place(j) for j in range(8)}
    places[4] = places[4]._replace(**changed)
    row = parse_row(KEY, pack_row(KEY, places, 4))
    assert row is not None and len(row.extents) == extents
    assert dict(row.places()) == places


def test_a_gap_ends_an_extent() -> None:
    row = parse_row(KEY, pack_row(KEY, {j: place(j) for j in range(8) if j != 3}, 4))
    assert row is not None and [(e.first, e.chunks) for e in row.extents] == [(0, 3), (4, 4)]


def test_claims_keep_their_chunks_owner_and_end() -> None:
    claims = {j: claim(bytes([j] * 32), 5, 1234) for j in (0, 1, 2, 9)}
    row = parse_row(KEY, pack_row(KEY, claims, 4))
    assert row is not None and [e.chunks for e in row.extents] == [3, 1]
    found = dict(row.places())
    assert {j: (p.chunk_hash, p.flags, p.segment, p.expires) for j, p in found.items()} == {
        j: (bytes([j] * 32), CLAIM, 5, 1234) for j in claims
    }


def forged(*extents: tuple[int, ...], leaves: int = 4) -> bytes:
    """A row of these extents with a valid check word."""
    present = sum((1 << e[1]) - 1 << e[0] for e in extents)
    body = rows._HEAD.pack(0, 1, len(extents), 0, present, leaves)[8:]
    body += b"".join(rows._EXTENT.pack(*e) for e in extents) + bytes(48 * present.bit_count())
    return checksum(body, seed=int.from_bytes(KEY[:8], "little")).to_bytes(8, "little") + body


def test_extents_out_of_order_are_a_miss() -> None:
    """Places would get the hashes of other chunks."""
    one, other = (0, 1, 0, 0, 1, 4, 0, 4096, 0, 0, 0), (5, 2, 0, 0, 1, 9, 3, 4096, 8, 2, 0)
    assert parse_row(KEY, forged(one, other)) is not None
    assert parse_row(KEY, forged(other, one)) is None
    assert parse_row(KEY, forged(one, one)) is None


@pytest.mark.parametrize(("chunks", "over"), [(1, 0), (3, 0), (3, 1)])
@pytest.mark.parametrize("field", ["block", "leaf", "seq"])
def test_the_last_place_of_an_extent_has_numbers_of_32_bits(field: str, chunks: int, over: int) -> None:
    """It may get an extent of its own. The block goes up by the stride, leaf tables by 4 words, records by one."""
    last = rows._U32_MAX
    step = {"block": 5, "leaf": 4, "seq": 1}[field]
    numbers = {"block": 16, "leaf": 8, "seq": 2, field: last - step * (chunks - 1)}
    extent = (2, chunks, 0, 0, 1, numbers["block"] + over * (field == "block"), 5, 4096,
              numbers["leaf"] + over * (field == "leaf"), numbers["seq"] + over * (field == "seq"), 0)  # fmt: skip
    row = parse_row(KEY, forged(extent, leaves=4))
    assert (row is None) is bool(over)
    if row is not None:
        places = dict(row.places())
        assert getattr(places[1 + chunks], field) == last


@pytest.mark.parametrize("field", range(2, 10))
def test_a_claim_with_an_offset_is_a_miss(field: int) -> None:
    """Neighbouring claims share an extent: differing offsets would be lost, or not fit the row (fuzz, 6001)."""
    extent = [3, 2, 0, CLAIM, 7, 0, 0, 0, 0, 0, 1234]
    row = parse_row(KEY, forged(tuple(extent)))
    assert row is not None and dict(row.places()) == {j: claim(bytes(32), 7, 1234) for j in (3, 4)}
    extent[field] |= 0xFF if field < 4 else rows._U32_MAX
    assert (parse_row(KEY, forged(tuple(extent))) is None) == (field not in (3, 4))


def test_every_flipped_bit_of_a_row_is_a_miss() -> None:
    value = pack_row(KEY, {0: place(0), 1: place(1), 7: place(3, segment=2)}, 4)
    assert parse_row(KEY, value) is not None
    for bit in range(8 * len(value)):
        damaged = bytearray(value)
        damaged[bit // 8] ^= 1 << bit % 8
        assert parse_row(KEY, bytes(damaged)) is None, f"bit {bit}"
    for size in range(len(value)):
        assert parse_row(KEY, value[:size]) is None


def test_the_row_of_another_key_is_a_miss() -> None:
    value = pack_row(KEY, {0: place(0)}, 4)
    assert parse_row(b"\xff" + KEY[1:], value) is None and parse_row(KEY, None) is None


@given(st.binary(max_size=200))
def test_arbitrary_row_bytes_never_raise(value: bytes) -> None:
    assert parse_row(KEY, value) is None


@given(st.binary(min_size=12, max_size=300))
def test_arbitrary_row_bytes_with_a_good_checksum_never_raise(body: bytes) -> None:
    seed = int.from_bytes(KEY[:8], "little")
    row = parse_row(KEY, checksum(body, seed=seed).to_bytes(8, "little") + body)
    if row is not None:
        places = dict(row.places())
        assert sum(1 << j for j in places) == row.present


@given(st.sets(slots, min_size=1), st.sets(slots), st.integers(1, RUN))
def test_matches_names_exactly_the_equal_chunks(present: set[int], differ: set[int], count: int) -> None:
    hashes = [bytes([j] * 32) for j in range(RUN)]
    places = {j: place(j, chunk_hash=b"\xff" * 32 if j in differ else hashes[j]) for j in present}
    row = parse_row(KEY, pack_row(KEY, places, 4))
    assert row is not None
    expected = sum(1 << j for j in present - differ if j < count)
    assert row.matches(b"".join(hashes[:count]), count) == expected


# ---------------------------------------------------------------- forks: the model


def row_key(chunk_hash: bytes) -> bytes:
    return page_key(DIGEST, GROUP.name, chunk_hash) + GROUP.full.pack()


def chain_of(names: tuple[int, ...]) -> list[bytes]:
    """Chunk hashes of a prompt whose chunks have these names."""
    hashes, parent = [], b"root"
    for name in names:
        parent = hashlib.sha256(parent + bytes([name])).digest()
        hashes.append(parent)
    return hashes


class Tree:
    """A real index, and a model of what it must hold: chunk hash -> its newest record, and its claim."""

    def __init__(self, env: lmdb.Environment) -> None:
        self.env = env
        self.tables = open_tables(env, create=True)
        with env.begin(write=True) as txn:
            for db in self.tables:
                txn.drop(db, delete=False)
        self.now = 1000
        self.records: dict[bytes, list[tuple[int, int]]] = {}  # every (segment, seq) that was named, newest last
        self.claims: dict[bytes, tuple[int, int]] = {}  # (segment, end)
        self.written: list[tuple[int, Publish]] = []  # (segment, record), published or not
        self.alive: set[int] = set()
        self.forgotten: set[tuple[int, int]] = set()
        self.seq = 0
        self.segment = self.new_segment()

    @contextmanager
    def session(self, write: bool = False) -> Iterator[Session]:
        with self.env.begin(write=write) as txn:
            yield Session(txn, self.tables, "generation", self.now)

    def new_segment(self) -> int:
        row = SegmentRow(
            random.Random(len(self.alive)).randbytes(16), bytes(16), bytes(16), ACTIVE, 0, 1, 0, 4096, 0, 0, 0
        )
        with self.session(write=True) as session:
            number = session.add_segment(row)
        self.alive.add(number)
        self.segment = number
        return number

    # -- what the model says ---------------------------------------------------------------

    def readable(self, record: tuple[int, int]) -> bool:
        return record[0] in self.alive and record not in self.forgotten

    def newest_is_live(self, chunk_hash: bytes) -> bool:
        """Whether its newest record can be read: then a lookup must find it."""
        records = self.records.get(chunk_hash)
        return bool(records) and self.readable(records[-1])

    def some_is_live(self, chunk_hash: bytes) -> bool:
        """Whether any of its records can be read: only then may a lookup find it."""
        return any(map(self.readable, self.records.get(chunk_hash, ())))

    def is_claimed(self, chunk_hash: bytes) -> bool:
        segment, end = self.claims.get(chunk_hash, (0, 0))
        return segment in self.alive and self.now < end

    # -- what happens ----------------------------------------------------------------------

    def put(self, hashes: list[bytes], first: int, last: int, publish_share: float) -> None:
        """Claim, write and publish chunks [first, last) as a writer does that believes them to be missing."""
        draw = random.Random(self.seq)
        with self.session() as session:
            present = self.find(session, hashes)
        wanted = [j for j in range(first, last) if not present >> j & 1]
        targets: list[Target] = []
        for begin in range(0, len(hashes), RUN):
            mine = [j - begin for j in wanted if begin <= j < begin + RUN]
            if not mine:
                continue
            run = RunKeys(begin, hashes[begin : begin + RUN], row_key, LEAVES)
            with self.session(write=True) as session:
                claims = claim_run(session, run, mine, self.segment)
            assert len(claims.targets) + claims.skipped + claims.in_flight == len(mine)
            assert claims.in_flight == sum(
                self.is_claimed(run.hashes[j]) and not self.some_is_live(run.hashes[j]) for j in mine
            )
            targets += claims.targets
        for target in targets:
            assert hashes[target.chunk] == target.chunk_hash and target.slot == target.chunk % RUN
            self.claims[target.chunk_hash] = (self.segment, self.now + CLAIM_SECONDS)
        records = []
        for target in targets:
            published = draw.random() < publish_share
            if not published and draw.random() < 0.5:
                continue  # killed before it was written
            self.seq += 1
            named = place(self.seq, self.segment, chunk_hash=target.chunk_hash)
            self.written.append((self.segment, Publish(target.head, target.slot, named)))
            if not published:
                continue
            records.append(self.written[-1][1])
            self.records.setdefault(target.chunk_hash, []).append((self.segment, self.seq))
            self.claims.pop(target.chunk_hash)
        if records:
            with self.session(write=True) as session:
                assert publish(session, row_key, LEAVES, records).records == len(records)

    def find(self, session: Session, hashes: list[bytes]) -> int:
        lookup = GroupLookup(Prompt(DIGEST, hashes), GROUP, GROUP.full)
        lookup.use_parts((GROUP.full,))
        for run in range(lookup.prompt.runs()):
            lookup.read_run(session, run, stop_at_gap=False)
        return lookup.found.present

    def walk(self, session: Session, hashes: list[bytes]) -> int:
        """Length of the prefix that a lookup of full attention finds."""
        lookup = GroupLookup(Prompt(DIGEST, hashes), GROUP, GROUP.full)
        lookup.use_parts((GROUP.full,))
        for run in range(lookup.prompt.runs()):
            found = lookup.read_run(session, run, stop_at_gap=True)
            if found.covered != (1 << lookup.prompt.run(run)[1]) - 1:
                break
        return prefix_length(lookup.found.present)

    def drop(self, number: int) -> None:
        with self.session(write=True) as session:
            row = session.segment(number)
            assert row is not None
            session.set_segment(number, row, row._replace(state=DROPPED))
            assert session.check_ledger()
        self.alive.discard(number)
        if number == self.segment:
            self.new_segment()

    def forget(self, chunk_hash: bytes) -> None:
        """Remove the record, as a reader does that found it to be bad."""
        with self.session(write=True) as session:
            with session.txn.cursor(db=self.tables.pages) as cursor:
                keys = [bytes(key) for key, _ in cursor]
            record = self.records[chunk_hash][-1]
            forget(session, keys, {record: b""})
        self.forgotten.add(record)

    def rebuild(self) -> None:
        """Rebuild from the segments, newest first, including unpublished records; bad ones are left out."""
        self.written = [(n, r) for n, r in self.written if self.readable((n, r.place.seq))]
        self.written.sort(key=lambda x: (x[0], x[1].place.seq))
        self.claims.clear()
        self.records.clear()
        with self.session(write=True) as session:
            session.txn.drop(self.tables.pages, delete=False)
            for _, record in reversed(self.written):
                publish(session, row_key, LEAVES, [record])
        for number, record in self.written:
            self.records.setdefault(record.place.chunk_hash, []).append((number, record.place.seq))

    def sweep(self, rows_max: int) -> None:
        start: bytes | None = b"\0"
        while start is not None:
            with self.session(write=True) as session:
                start, _ = sweep(session, start, rows_max)

    def check(self, prompts: list[list[bytes]]) -> None:
        with self.session() as session:
            for hashes in prompts:
                must = [self.newest_is_live(h) for h in hashes]
                may = [self.some_is_live(h) for h in hashes]
                length = self.walk(session, hashes)
                wanted = must.index(False) if False in must else len(must)
                assert length >= wanted, f"a walk ends at {length}, {wanted} chunks are stored"
                assert all(may[:length]), "a walk found what is not there"
                present = self.find(session, hashes)
                for j in range(len(hashes)):
                    found = bool(present >> j & 1)
                    assert found or not must[j], f"chunk {j} is stored and not found"
                    assert may[j] or not found, f"chunk {j} is found and not stored"


class Forks(RuleBasedStateMachine):
    """Prompts that share beginnings, saved whole and in pieces, while segments are dropped and records found bad."""

    env: lmdb.Environment

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree(self.env)
        self.prompts: list[tuple[int, ...]] = []

    def chains(self) -> list[list[bytes]]:
        return [chain_of(p) for p in self.prompts]

    def pick(self, number: int) -> list[bytes]:
        return chain_of(self.prompts[number % len(self.prompts)])

    @initialize(length=st.integers(3, 12) | st.integers(30, 36))
    def begin(self, length: int) -> None:
        self.prompts.append((0,) * length)
        self.tree.put(chain_of(self.prompts[0]), 0, length, 1.0)

    @precondition(lambda self: len(self.prompts) < 8)
    @rule(
        base=st.integers(0, 20), fork=st.integers(0, 9) | st.integers(30, 33), more=st.integers(1, 8), put=st.booleans()
    )
    def branch(self, base: int, fork: int, more: int, put: bool) -> None:
        """A new prompt that shares ``fork`` chunks with an old one."""
        shared = self.prompts[base % len(self.prompts)][:fork]
        new = (*shared, *[len(self.prompts)] * more)
        self.prompts.append(new)
        if put:
            self.tree.put(chain_of(new), 0, len(new), 1.0)

    @rule(which=st.integers(0, 20), share=st.sampled_from([1.0, 1.0, 0.5, 0.0]))
    def put_whole(self, which: int, share: float) -> None:
        hashes = self.pick(which)
        self.tree.put(hashes, 0, len(hashes), share)

    @rule(which=st.integers(0, 20), first=st.integers(0, 36), count=st.integers(1, 6))
    def put_piece(self, which: int, first: int, count: int) -> None:
        """Save a piece, as is done for groups of windows and snapshots."""
        hashes = self.pick(which)
        first = min(first, len(hashes) - 1)
        self.tree.put(hashes, first, min(len(hashes), first + count), 1.0)

    @rule()
    def next_segment(self) -> None:
        self.tree.new_segment()

    @rule(which=st.integers(0, 20))
    def another_writer(self, which: int) -> None:
        """Append to an older segment."""
        alive = sorted(self.tree.alive)
        self.tree.segment = alive[which % len(alive)]

    @rule()
    def rebuild(self) -> None:
        self.tree.rebuild()

    @rule(which=st.integers(0, 20))
    def evict(self, which: int) -> None:
        alive = sorted(self.tree.alive)
        self.tree.drop(alive[which % len(alive)])

    @rule(which=st.integers(0, 20), chunks=st.sets(st.integers(0, 9) | st.integers(30, 34), min_size=1, max_size=3))
    def find_bad_records(self, which: int, chunks: set[int]) -> None:
        hashes = self.pick(which)
        for chunk in chunks:
            h = hashes[chunk % len(hashes)]
            if self.tree.newest_is_live(h):
                self.tree.forget(h)

    @rule(rows_max=st.sampled_from([1, 3, 256]))
    def sweep(self, rows_max: int) -> None:
        self.tree.sweep(rows_max)

    @rule(seconds=st.integers(1, 7))
    def time_passes(self, seconds: int) -> None:
        self.tree.now += seconds

    @invariant()
    def lookups_equal_the_model(self) -> None:
        self.tree.check(self.chains())


@pytest.fixture
def env(tmp_path: Path) -> Iterator[lmdb.Environment]:
    with open(tmp_path / "data.mdb", "xb") as file:
        made = open_environment(file.fileno(), 1 << 26)
    yield made
    made.close()


def test_stored_chunks_of_forking_prompts_are_found_and_nothing_else(env: lmdb.Environment) -> None:
    Forks.env = env
    run_state_machine_as_test(
        Forks,
        settings=settings(max_examples=100, stateful_step_count=25, suppress_health_check=list(HealthCheck)),
    )


A, B, C, D = (tuple([0] * shared + [name] * (10 - shared)) for name, shared in ((0, 10), (1, 2), (2, 2), (3, 2)))


@pytest.fixture
def tree(env: lmdb.Environment) -> Tree:
    """Prompt A in segment 1."""
    tree = Tree(env)
    tree.put(chain_of(A), 0, 10, 1.0)
    return tree


def test_a_chunk_that_is_stored_again_goes_to_a_row_that_lookups_read(tree: Tree) -> None:
    """A fork has two rows: a chunk that was lost before the second row must not be stored in the second row."""
    late = (*B[:5], *[9] * 5)
    tree.put(chain_of(B), 0, 10, 1.0)  # its own row from chunk 2 on
    tree.put(chain_of(late), 0, 10, 1.0)  # and from chunk 5 on
    tree.forget(chain_of(B)[3])
    prompts = [chain_of(p) for p in (A, B, late)]
    tree.check(prompts)
    tree.put(chain_of(late), 0, 10, 1.0)
    tree.check(prompts)
    assert all(tree.newest_is_live(h) for p in prompts for h in p)


def test_a_row_behind_two_gaps_is_not_overwritten(tree: Tree) -> None:
    late = (*B[:5], *[9] * 5)
    tree.put(chain_of(B), 0, 10, 1.0)
    tree.put(chain_of(late), 0, 10, 1.0)
    tree.forget(chain_of(late)[1])
    tree.forget(chain_of(late)[5])
    tree.put(chain_of(late), 0, 10, 1.0)
    tree.check([chain_of(p) for p in (A, B, late)])


def test_a_row_behind_a_gap_stays_in_reach(tree: Tree) -> None:
    """The fork's first chunk is stored again while lookups reach its row in no other way."""
    tree.new_segment()
    tree.put(chain_of(B), 2, 10, 1.0)
    tree.forget(chain_of(B)[2])
    tree.drop(1)
    tree.put(chain_of(B), 0, 10, 1.0)
    tree.check([chain_of(A), chain_of(B)])


def test_pages_of_a_window_stay_in_reach_when_one_is_stored_again(tree: Tree) -> None:
    tree.put(chain_of(B), 5, 9, 1.0)  # a row of its own, behind a gap
    tree.forget(chain_of(B)[5])
    tree.put(chain_of(B), 5, 9, 1.0)
    tree.check([chain_of(A), chain_of(B)])


def test_an_expired_claim_reserves_its_slot_for_its_chunk_until_its_segment_is_dropped(env: lmdb.Environment) -> None:
    """Also after a sweep: the segment may hold the killed writer's record, and a rebuild would name it in that slot."""
    tree = Tree(env)
    fork, stem = chain_of((0, 0, 0, 1, 1)), chain_of((0, 0, 0, 2, 2))
    tree.put(fork, 0, 3, 1.0)
    killed = tree.new_segment()
    tree.put(fork, 3, 5, 0.0)
    tree.new_segment()

    def heads_of(hashes: list[bytes]) -> set[bytes]:
        with tree.session(write=True) as session:
            claims = claim_run(session, RunKeys(0, hashes, row_key, LEAVES), [3, 4], tree.segment)
            session.txn.abort()
        return {target.head for target in claims.targets}

    tree.now += CLAIM_SECONDS + 1
    tree.sweep(256)
    assert heads_of(stem) == {stem[3]}, "the put took the killed writer's slots"
    assert heads_of(fork) == {fork[0]}
    tree.drop(killed)
    tree.sweep(256)
    assert heads_of(stem) == {stem[0]}

"""Numbers of the packages that decide what is stored, found, charged and dropped.

Each changes on purpose, here as well: limits, deadlines, sizes on the disk, measured sizes of batches. Most cannot be
told from a number near them by what a store does in a test: a limit of 16 KiB on a file of 300 bytes, a deadline of
30 s. A slip in one of them changes what is promised all the same.
"""

from __future__ import annotations

import ast
import importlib
import mmap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "format", "segments", "index", "write", "read", "lookup", "eviction", "directory", "maintenance", "transfer",
)  # fmt: skip
# fmt: off
NUMBERS: dict[str, dict[str, Any]] = {
    "directory.access_times": {
        "STAMP_BYTES": 8, "_OPEN_MAX": 64, "RECORDS_MAX": 8_388_608, "REQUESTS_MAX": 4_096, "FLUSH_SECONDS": 0.25,
        "NOTED_MAX": 1_048_576, "CLOSE_SECONDS": 1.0, "REQUEST_US": 600_000_000,
    },
    "directory.config": {
        "KIB": 1_024, "MIB": 1_048_576, "GIB": 1_073_741_824, "CAPACITY_MIN": 16_777_216, "SEGMENT_MIN": 262_144,
        "SEGMENT_MAX": 4_294_967_296, "SEGMENTS_MIN": 8, "INDEX_MIN": 2_097_152, "INDEX_MAX": 68_719_476_736,
        "OVERHEAD_BYTES": 1_048_576, "PIN_FILES_SHARE": 1_024, "PROCESS_FILES_SHARE": 16_384,
        "COUNT_FILES_SHARE": 8_192, "DURATION_MAX": 1000000000000.0, "TOML_BYTES_MAX": 262_144, "DOTS_MAX": 100,
        "REMOTE_REQUESTS": 8, "REMOTE_REQUESTS_MAX": 64, "REMOTE_SECONDS": 30.0, "REMOTE_RATE_MIN": 100_000,
        "REMOTE_RETENTION_MIN": 3600.0, "REMOTE_UNUSED_MIN": 172800.0,
        "_UNITS": {
            "": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000, "t": 1_000_000_000_000, "ki": 1_024,
            "mi": 1_048_576, "gi": 1_073_741_824, "ti": 1_099_511_627_776,
        },
        "_SECONDS": {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800},
    },
    "directory.config_file": {
        "LOCK_SECONDS": 2.0,
    },
    "directory.engine_speeds": {
        "ENGINES_MAX": 32, "TOKENS_PER_SECOND_MAX": 100_000_000,
    },
    "directory.event_log": {
        "FILE_BYTES": 16_384, "FILE_BYTES_MAX": 1_048_576, "LINE_BYTES_MAX": 2_048, "WAIT_SECONDS": 0.2, "TRIES": 4,
        "AT_US_MAX": 144_115_188_075_855_872, "NUMBER_MAX": 9_223_372_036_854_775_808, "_TEXT_MAX": 256,
    },
    "directory.liveness": {
        "OWNER_BYTES": 16, "HEARTBEAT_SECONDS": 5.0, "FOREIGN_FRESH_SECONDS": 30.0, "DAMAGED_CHARS": 4,
        "OPENING_SECONDS": 60.0, "_LINE_BYTES": 64, "_PINNED_BYTES": 8, "COMMAND_BYTES": 32, "_STATUS_AT": 128,
    },
    "directory.pin_files": {
        "PIN_BYTES_MAX": 8_388_608,
    },
    "directory.pinned_memory": {
        "FRESH_SECONDS": 1.0,
    },
    "directory.purge_marks": {
        "MARK_BYTES_MAX": 1_048_576,
    },
    "directory.root": {
        "SUPER_BYTES_MAX": 16_384,
    },
    "directory.shared_counters": {
        "SLOT_BYTES": 16_384, "NAMES_MAX": 160, "COUNT_BYTES_MAX": 80, "NAMESPACES_MAX": 512,
        "NAMESPACE_SLOT_BYTES": 16_384, "NAMESPACE_BYTES_MAX": 510, "EVERY_SECONDS": 5.0,
        "_COUNT_MAX": 4_611_686_018_427_387_904,
    },
    "directory.slot_file": {
        "SLOT_BYTES_MIN": 4_096, "SLOT_BYTES_MAX": 1_048_576, "WAIT_SECONDS": 0.2,
        "TURNS_MAX": 4_611_686_018_427_387_904, "READS_MAX": 3,
    },
    "directory.watch": {
        "BUFFER_BYTES": 65_536, "REST_SECONDS": 0.01, "STOP_SECONDS": 5.0,
    },
    "eviction.dry_run": {
        "STEPS_MAX": 100_000,
    },
    "eviction.evictor": {
        "LOCK_SECONDS": 30.0, "BRIEF_SECONDS": 0.5, "MISSING_SECONDS": 0.5, "INDEX_SECONDS": 2.0, "SPARSE": 0.6,
        "INDEX_SHARE": 32, "PROBE_SECONDS": 0.05, "HELD_SECONDS": 0.02,
    },
    "eviction.policy": {
        "RELOCATED_LIFE_US": 150_000_000, "AGE_POWER": 1.5, "RELOCATE_WORTH": 2.0, "AHEAD_US": 1_000_000,
        "WRITE_BUDGET": 0.05, "BUDGET_SEGMENTS": 4,
    },
    "eviction.reclaimer": {
        "SWEEP_ROWS": 256, "ROOM_BYTES_MIN": 131_072, "ROOM_SHARE": 64, "FAILURES_MAX": 4, "BATCH_MAX": 16,
        "FORGET_MAX": 32,
    },
    "eviction.usage": {
        "SCALE_US": 50_000_000, "LIFE_MAX_US": 3_600_000_000,
    },
    "eviction.victims": {
        "SEGMENTS_PER_VICTIM": 512, "RANKING_SECONDS": 1.0,
    },
    "format.checksums": {
        "LEAF_BYTES": 8, "ROOT_BYTES": 16,
    },
    "format.codec": {
        "PLANES": (1, 2, 4, 8), "_GAIN": 0.98,
    },
    "format.segment": {
        "BLOCK": 4_096, "FIRST_TABLE_BYTES": 12_288, "TABLE_BYTES": 16_384, "DESCRIPTOR_BYTES_MAX": 65_536,
        "COMPATIBLE": 0, "READ_ONLY_COMPATIBLE": 0, "INCOMPATIBLE": 0, "KIND_PART": 1, "KIND_NAMESPACE": 2,
        "KIND_CHAIN": 3, "CODEC_RAW": 0, "CODEC_ZSTD": 1, "CODEC_PLANES": 2, "FLAG_PINNED": 1, "FLAG_DIRECT": 2,
        "FLAG_CARRIED": 4, "PURGE_PENDING": 1, "PURGE_ALL": 2, "HEADER_BYTES": 116, "ENTRY_BYTES": 160,
        "SEAL_BYTES": 72,
    },
    "index.deadlines": {
        "LOOKUP_SECONDS": 0.25, "COMMIT_SECONDS": 2.0,
    },
    "index.environment": {
        "PROBE_SECONDS": 0.1, "PROBE_WRITE_SECONDS": 0.005, "FULL": 0.85, "READ_AHEAD_BYTES_MAX": 1_073_741_824,
        "ROWS_PER_HOLD": 512,
    },
    "index.gate": {
        "POLL_SECONDS": 7.5e-05,
    },
    "index.ledger": {
        "QUOTA_BYTES": 8, "MARK_BYTES": 64, "EPOCH_MAX": 4_294_967_295,
    },
    "index.lmdb_files": {
        "PAGE": min(mmap.PAGESIZE, 32_768), "SLACK_BYTES": 8_388_608,
    },
    "index.native_session": {
        "PARTS_MAX": 256,
    },
    "index.rows": {
        "RUN": 32, "_VERSION": 1, "_U32_MAX": 4_294_967_295, "CLAIM": 1, "CLAIM_SECONDS": 5,
    },
    "index.session": {
        "PAGE": 4_096, "ROW_OVERHEAD": 10, "SAMPLE_ROWS": 256, "DIGEST_BYTES": 32, "PARTS_MAX": 256,
    },
    "index.tables": {
        "ACTIVE": 1, "SEALED": 2, "DROPPED": 3,
    },
    "index.trust": {
        "CHECKED_BYTES_MAX": 268_435_456, "PIECE_BYTES": 1_048_576,
    },
    "lookup.gaps": {
        "KEYS_PER_HOLD": 512,
    },
    "lookup.matcher": {
        "NATIVE_TRIES": 4,
    },
    "lookup.part_cover": {
        "PARTS_MAX": 256,
    },
    "lookup.prefix_match": {
        "HOLD_SECONDS": 60.0,
    },
    "lookup.prompt_pages": {
        "TOKENS_MAX": 16_777_216,
    },
    "lookup.search": {
        "ROWS_PER_HOLD": 256,
    },
    "maintenance.pins": {
        "PINNED_SHARE": 0.5, "PIN_BYTES": 512, "ID_BYTES": 36, "ROOM_SECONDS": 5.0,
    },
    "maintenance.purge": {
        "LOCK_SECONDS": 10.0, "KEYS_PER_HOLD": 128,
    },
    "maintenance.rebuild": {
        "ENTRIES_PER_COMMIT": 20_000, "PAGES_PER_ENTRY": 16,
    },
    "maintenance.recompress": {
        "IDLE_SECONDS": 3600.0, "LOCK_SECONDS": 30.0, "FAILURES_MAX": 3, "KEYS_PER_HOLD": 256,
    },
    "maintenance.verify": {
        "ROWS_PER_HOLD": 256, "PROBLEMS_MAX": 1_000, "QUARANTINE_FILES_MAX": 64,
    },
    "maintenance.warm": {
        "BLOCK_BYTES": 33_554_432, "THREADS": 4, "READ_BYTES": 1_048_576, "SAMPLED_SEGMENTS_MAX": 64,
        "GAP_BYTES": 65_536,
    },
    "read.fetch": {
        "COLD_THREADS": 8, "PIECE_BYTES": 524_288, "READ_BYTES": 4_194_304, "COPY_BYTES": 2_097_152,
        "COPY_THREADS": 3, "VERIFIED_MAX": 1_048_576,
    },
    "read.reader": {
        "VIEW_BYTES": 268_435_456,
    },
    "segments.open_segments": {
        "LOCK_TRIES": 40, "LOCK_SECONDS": 0.00025, "MISSING_MAX": 256, "CLOSE_SECONDS": 5.0,
    },
    "segments.scan": {
        "_U32_MAX": 4_294_967_295,
    },
    "segments.writer": {
        "WRITE_THREADS": 4, "NATIVE_BYTES": 65_536, "OVERLAP_BYTES": 4_194_304,
    },
    "transfer.append_process": {
        "ALIVE_SECONDS": 1.0,
    },
    "transfer.control": {
        "_SLICE_SECONDS": 0.05, "_QUERY_SECONDS": 0.001,
    },
    "transfer.host_io": {
        "SAVE_SECONDS": 2.0, "LOAD_SECONDS": 30.0, "CLOSE_SECONDS": 10.0, "WARM_SECONDS": 10.0,
    },
    "transfer.load": {
        "AT_ONCE_BYTES": 8_388_608,
    },
    "transfer.save": {
        "LANE_BYTES": 134_217_728, "REQUEST_BYTES": 268_435_456,
    },
    "transfer.staging": {
        "SLOT_ALIGN": 4_096, "ASK_SECONDS": 0.02, "SEARCH_MAX": 256,
    },
    "transfer.unfinished": {
        "_SLEEP_SECONDS_MAX": 3600.0,
    },
    "transfer.units": {
        "UNITS_MAX": 16_777_216,
    },
    "transfer.workers": {
        "BATCH_BYTES": 16_777_216, "BATCH_PAGES": 128, "STALLED_SECONDS": 0.5, "SLOW_BYTES_PER_SECOND": 512000000.0,
    },
    "write.active_segments": {
        "STEP": 4, "IDLE_SECONDS": 10.0, "CLASSES_MAX": 32, "LANES": 8, "BUSY_SECONDS": 0.005, "NO_ROOM_SECONDS": 1.0,
        "PROBE_SECONDS": 0.05, "FORGET_SECONDS": 10.0, "CLOSE_SECONDS": 5.0, "SYNC_SECONDS": 1.0,
    },
    "write.append_request": {
        "HASH_BYTES": 32,
    },
    "write.appender": {
        "BATCH_PAGES": 256, "BATCH_BYTES": 67_108_864, "SPACE_SECONDS": 5.0, "SPARE_RECORDS": 8,
    },
    "write.class_locks": {
        "POLL_SECONDS": 0.001, "APPEND_SECONDS": 30.0,
    },
    "write.encode": {
        "GAIN_MIN": 0.9,
    },
    "write.relocate": {
        "BATCH_BYTES": 8_388_608, "RECORDS": 256,
    },
}
# fmt: on


def numbers_of(module: str) -> dict[str, Any]:
    """The module's constants that are numbers, or hold only numbers, and have a digit in the source."""
    path = ROOT / "kvfs" / f"{module.replace('.', '/')}.py"
    loaded = importlib.import_module(f"kvfs.{module}")
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if value is None or not any(
            isinstance(n, ast.Constant) and type(n.value) in (int, float) for n in ast.walk(value)
        ):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[union-attr]
        names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name) and n.id.strip("_").isupper()]
        found |= {name: getattr(loaded, name) for name in names if is_number(getattr(loaded, name))}
    return found


def is_number(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(is_number, value.values()))
    return all(map(is_number, value)) if type(value) is tuple else type(value) in (int, float)


MODULES = sorted(
    f"{package}.{path.stem}" for package in PACKAGES for path in (ROOT / "kvfs" / package).glob("[!_]*.py")
)


@pytest.mark.parametrize("module", MODULES)
def test_a_number_changes_on_purpose(module: str) -> None:
    assert numbers_of(module) == NUMBERS.get(module, {})


def test_no_number_of_a_module_that_is_gone() -> None:
    assert set(NUMBERS) <= set(MODULES)

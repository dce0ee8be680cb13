"""Bugs to plant: exact replacements in the source, and the tests that must notice each.

Most are several lines long; ``python -m tools.mutants`` also draws small changes at random.
The list is checked against the source by ``tests/tools/test_mutations.py``; ``python -m tools.mutants named`` plants them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Mutation(NamedTuple):
    """``old`` stands exactly once in ``path``."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, root: Path) -> str:
        """The text of the source below ``root`` with this bug. ValueError unless ``old`` occurs exactly once."""
        text = (root / self.path).read_text(encoding="utf-8")
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.path} has the replaced text {found} times, not once: update it")
        return text.replace(self.old, self.new)


MUTATIONS = (
    Mutation(
        "skip the checksum on read", "kvfs/read/fetch.py",
        "            return job.bits(), []\n        good = [self._agrees(root, job.root(i)) for i, root in enumerate(roots)]",
        "            return job.bits(), []\n        good = [True for i, root in enumerate(roots)]",
        ("tests/test_namespace.py::test_a_page_with_a_flipped_byte_is_a_miss_and_stored_again",),
    ),
    Mutation(
        "skip the checksum of views", "kvfs/read/reader.py",
        "if not self._fetcher.check(job, n, view, leaf_bytes))",
        "if not view)",
        ("tests/test_namespace.py::test_a_damaged_page_ends_the_views",),
    ),
    Mutation(
        "skip the checksum of leaves read for other parts", "kvfs/read/assemble.py",
        'if checksum(data) != int.from_bytes(table[row * LEAF_BYTES : (row + 1) * LEAF_BYTES], "little"):', "if not data:",
        ("tests/test_namespace.py::test_damage_is_seen_by_a_reader_of_other_parts",),
    ),
    Mutation(
        "publish before writing", "kvfs/segments/writer.py",
        '            self._files.write_all(self.fd, [*buffers, b"".join(tables)], start)\n            return tables',
        '            data = b"".join(bytes(b) for b in [*buffers, *tables])\n'
        "            threading.Timer(0.05, self._files.write_all, (self.fd, [data], start)).start()\n"
        "            return tables",
        ("tests/crash/test_order_of_writes.py",),
    ),
    Mutation(
        "write table entries before payloads", "kvfs/segments/writer.py",
        "        tables = self._write_payloads(records, buffers, start, leaves_at)\n",
        "        tables = [leaf_table(r.payload, r.leaf_bytes) for r in records]\n"
        "        late = partial(self._write_payloads, records, buffers, start, leaves_at)\n"
        "        write_entries = self._write_entries\n"
        "        self._write_entries = lambda *a: (write_entries(*a), late(), self.__dict__.pop('_write_entries'))[0]\n",
        ("tests/crash/test_order_of_writes.py",),
    ),
    Mutation(
        "publish before the sync of level sync", "kvfs/write/appender.py",
        '        if self._c.settings.sync == "sync":\n            self._active.sync(writer)\n        else:\n'
        "            self._active.note_dirty(job.segment_class)\n"
        "        stored = self._publish(job, named, active)\n",
        "        stored = self._publish(job, named, active)\n"
        '        if self._c.settings.sync == "sync":\n            self._active.sync(writer)\n        else:\n'
        "            self._active.note_dirty(job.segment_class)\n",
        ("tests/crash/test_order_of_writes.py",),
    ),
    Mutation(
        "no sync at level sync", "kvfs/write/active_segments.py",
        "            self._c.files.fdatasync(writer.fd)\n        except OSError:\n            writer.dead = True",
        "            pass\n        except OSError:\n            writer.dead = True",
        ("tests/crash/test_crash_images.py",),
    ),
    Mutation(
        "retry a failed sync", "kvfs/write/active_segments.py",
        "        except OSError:\n            writer.dead = True\n            self._c.counters.add(\"sync_errors\")",
        "        except OSError:\n            return self._c.files.fdatasync(writer.fd)\n"
        "            self._c.counters.add(\"sync_errors\")",
        ("tests/crash/test_order_of_writes.py",),
    ),
    Mutation(
        "ignore a short write", "kvfs/system/files.py",
        "                    batch[0] = batch[0][n:]\n", "                    batch = []\n",
        ("tests/crash/test_order_of_writes.py",),
    ),
    Mutation(
        "read through the page cache in mode staging", "kvfs/segments/open_segments.py",
        "        fd = self.direct(held) if direct or self._mode.direct else -1\n        if fd >= 0:\n"
        "            direct_io.read(self._files, fd, target, offset)\n        elif self._mode.direct:",
        "        fd = self.direct(held) if direct and not self._mode.direct else -1\n        if fd >= 0:\n"
        "            direct_io.read(self._files, fd, target, offset)\n        elif not target:",
        ("tests/directory/test_io_mode.py",),
    ),
    Mutation(
        "write payloads through the page cache in mode staging", "kvfs/segments/writer.py",
        "            writes = list(self._direct_writes(records, start, 1 if small else WRITE_THREADS))\n", "            pass\n",
        ("tests/directory/test_io_mode.py", "tests/crash/test_order_of_writes.py"),
    ),
    Mutation(
        "map a segment that is being written past the page cache", "kvfs/segments/open_segments.py",
        "            held.mappable = not written_direct or sealed_bytes(files, held) > 0\n",
        "            held.mappable = True\n",
        ("tests/directory/test_io_mode.py",),
    ),
    Mutation(
        "go on within a block after a short direct write", "kvfs/system/files.py",
        "                n = self.pwritev(fd, batch, offset)\n                n -= n % block\n",
        "                n = self.pwritev(fd, batch, offset)\n",
        ("tests/directory/test_io_mode.py",),
    ),
    Mutation(
        "take a short read for a whole one", "kvfs/system/files.py",
        "                raise OSError(errno.EIO, f\"file ends {total - done} bytes short\")", "                return",
        ("tests/test_namespace.py::test_a_truncated_segment_serves_what_is_left",
         "tests/crash/test_order_of_writes.py"),
    ),
    Mutation(
        "drop the capacity reservation", "kvfs/index/ledger.py",
        "    if growth > 0 and used + growth > limits.limit:\n", "    if growth > 1 << 60:\n",
        ("tests/crash/test_order_of_writes.py", "tests/golden"),
    ),
    Mutation(
        "trust a dirty index", "kvfs/index/trust.py",
        "if not same or state is None or not (state.clean or (not alone and state.boot == boot)):",
        "if not same or state is None:",
        ("tests/test_store_open.py::test_an_index_that_dead_processes_left_is_rebuilt",),
    ),
    Mutation(
        "trust an index of another boot", "kvfs/index/trust.py",
        "(not alone and state.boot == boot)", "not alone",
        ("tests/test_store_open.py::test_a_dirty_index_of_another_boot_is_not_trusted_though_a_process_holds_it",),
    ),
    Mutation(
        "commit before the index is marked dirty", "kvfs/index/environment.py",
        "        if not self._read_only and (state.clean or alone):\n", "        if self._closed:\n",
        ("tests/crash/test_order_of_writes.py", "tests/test_store_open.py"),
    ),
    Mutation(
        "off by one in the record table", "kvfs/segments/writer.py",
        "            if slot + len(packed) == fmt.slots_of_table(table == fmt.FIRST_TABLE) - 1:",
        "            if slot + len(packed) == fmt.slots_of_table(table == fmt.FIRST_TABLE):",
        ("tests/crash/test_order_of_writes.py",),
    ),
    Mutation(
        "cut a published page off when trimming", "kvfs/segments/writer.py",
        '        """Free the blocks behind the tail, which were never published; returns the new file size."""\n        end = align(self.tail)',
        '        """Free the blocks behind the tail, which were never published; returns the new file size."""\n        end = align(self.tail) - BLOCK',
        ("tests/test_store_open.py::test_a_store_opens_as_it_was_closed", "tests/crash/test_order_of_writes.py"),
    ),
    Mutation(
        "reuse a ring slot early", "kvfs/transfer/staging.py",
        "        taken = self._free[first : first + n]\n        del self._free[first : first + n]",
        "        taken = self._free[first : first + n]\n        del self._free[first + 1 : first + n]",
        ("tests/transfer/test_staging.py",),
    ),
    Mutation(
        "load in the wrong direction", "kvfs/pages/host_copy.py",
        "    return _move(views, group, part, device_kv, units, chunks, first_token, to_page=False)",
        "    return _move(views, group, part, device_kv, units, chunks, first_token, to_page=True)",
        ("tests/pages/test_host_copy.py",),
    ),
    Mutation(
        "settle a page twice", "kvfs/transfer/control.py",
        "            self._open[group] ^= fresh  # last: an interrupt before it has these pages recorded again\n", "",
        ("tests/transfer/test_host_io.py::test_save_and_load",),
    ),
    Mutation(
        "take the GPU's copy without a check", "kvfs/gpu/batches.py",
        "kernels.scatter(launch, shape, check=check)", "kernels.scatter(launch, shape, check=False)",
        ("tests/gpu/test_gpu_io.py",),
    ),
    Mutation(
        "keep the ring's slots from the next group", "kvfs/gpu/load.py",
        "if pages.later and group.source.has_slots:", "if False:",
        ("tests/gpu/test_load_groups.py::test_slots_are_released_before_the_next_group_wants_them",),
    ),
    Mutation(
        "do not launch what was copied", "kvfs/gpu/load.py",
        "            launches.all()\n            self._transfer.expect", "            self._transfer.expect",
        ("tests/gpu/test_load_groups.py",),
    ),
    Mutation(
        "enqueue a load in its caller's thread while another is enqueued", "kvfs/gpu/turns.py",
        "            if self._closed or self._enqueued_now is not None or self._under_way:\n", "            if self._closed:\n",
        ("tests/gpu/test_load_from_caller.py",),
    ),
    Mutation(
        "wait for a disk in the thread that calls load", "kvfs/gpu/head_start.py",
        "                if not files.read_cached(run.held.fd, memoryview(tables), run.leaf):\n", "                if False:\n",
        ("tests/gpu/test_load_from_caller.py",),
    ),
    Mutation(
        "keep the turn of a load that was interrupted", "kvfs/gpu/head_start.py",
        "            if self._turn:\n                gpu.turns.over(self)\n", "            pass\n",
        ("tests/gpu/test_load_from_caller.py",),
    ),
    Mutation(
        "wait for the end of a load before the next one begins", "kvfs/gpu/gpu_io.py",
        "Turns(UNDER_WAY)", "Turns(1)", ("tests/gpu/test_load_overlap.py",),
    ),
    Mutation(
        "give the command buffer of a load to the next one", "kvfs/gpu/lane.py",
        "            self._free.remove(buffer)\n", "            pass\n", ("tests/gpu/test_load_overlap.py",),
    ),
    Mutation(
        "hold none of what is found while the first pages come", "kvfs/lookup/incremental.py",
        "            self.held.update(self._matcher.acquire(new, self._read.generation))\n",
        "            self._matcher.acquire(new, self._read.generation)\n",
        ("tests/lookup/test_incremental.py",),
    ),
    Mutation(
        "restore up to where the first group ends, whatever the others have", "kvfs/lookup/incremental.py",
        "        chunks = min([self.limit, *self._found.values()])\n",
        "        chunks = self._found[self._needs_all[0]] if self._needs_all else self.limit\n",
        ("tests/lookup/test_incremental.py",),
    ),
    Mutation(
        "look all of a prompt up before its first pages come", "kvfs/gpu/page_feed.py",
        "wanted, later, FIRST_PAGES, ahead)", "wanted, later, 1 << 30, ahead)",
        ("tests/gpu/test_restore.py::test_the_first_pages_are_enqueued_before_the_rest_is_looked_up",),
    ),
    Mutation(
        "call back where the ends of loads are waited for", "kvfs/gpu/load.py",
        "if transfer.calls_back:", "if False:", ("tests/gpu/test_load_overlap.py",),
    ),
    Mutation(
        "enqueue batches without end", "kvfs/gpu/batches.py",
        "            if due is None or due.query():", "            if True:",
        ("tests/gpu/test_lane.py",),
    ),
    Mutation(
        "take any number of calls for a batch", "kvfs/gpu/lane.py",
        "            if calls > CALLS or back", "            if back",
        ("tests/gpu/test_lane.py",),
    ),
    Mutation(
        "give out the address of what is still pinned", "kvfs/gpu/registration.py",
        "        return False\n    mapping.close()\n", "    mapping.close()\n",
        ("tests/gpu/test_gpu_io_ends.py",),
    ),
    Mutation(
        "end the capture of a graph", "kvfs/gpu/device.py",
        "            driver.relax_capture()\n", "",
        ("tests/gpu/test_device_capture.py",),
    ),
    Mutation(
        "give slots back while copies read them", "kvfs/gpu/page_source.py",
        "while self._leases and self._leases[0][0].query():", "while self._leases:",
        ("tests/gpu/test_load_late.py",),
    ),
    Mutation(
        "wait for a hung disk to give memory back", "kvfs/directory/pinned_memory.py",
        "            self.mine -= nbytes\n", "            self.mine -= nbytes\n            self._say()\n",
        ("tests/gpu/test_preregister.py",),
    ),
    Mutation(
        "register what the disk has yet to bring", "kvfs/gpu/registration.py",
        "            self._bring_in(held, mapping.address, start, nbytes)\n", "            pass\n",
        ("tests/gpu/test_lane.py",),
    ),
    Mutation(
        "pin ahead what was used first", "kvfs/gpu/preregister.py",
        "key=lambda s: -s.stamp_us", "key=lambda s: s.stamp_us",
        ("tests/gpu/test_preregister.py",),
    ),
    Mutation(
        "let others append where a write hangs", "kvfs/runtime/open_store.py",
        "        if not free:\n", "        if False:\n",
        ("tests/write/test_active_segments_hanging_writes.py",),
    ),
    Mutation(
        "scatter a page that differs", "kvfs/kernels/cells.py",
        "            bad = tl.load(flags + tl.load(granule + 2))", "            bad = 0",
        ("tests/gpu/test_gpu_io.py",),
    ),
    Mutation(
        "swap no lanes", "kvfs/kernels/xxh3.py",
        "    return lanes + _swap(plain, LEAVES)\n", "    return lanes + plain\n",
        ("tests/kernels/test_xxh3.py",),
    ),
    Mutation(
        "skip the sync of super's directory", "kvfs/directory/root.py",
        "            files.unlink(temporary, dir_fd=root)\n    files.fsync(root)", "            files.unlink(temporary, dir_fd=root)",
        ("tests/crash/test_order_of_writes.py",),
    ),
    Mutation(
        "replace a small file without a sync of its bytes", "kvfs/directory/root.py",
        "                self.files.write_all(fd, [data], 0)\n                if durable:\n                    self.files.fsync(fd)",
        "                self.files.write_all(fd, [data], 0)",
        ("tests/crash/test_order_of_writes.py",),
    ),
    Mutation(
        "evict pinned pages", "kvfs/eviction/victims.py",
        "if row.state == DROPPED or row.segment_id in pinned:", "if row.state == DROPPED:",
        ("tests/golden/test_golden.py::test_a_pin_of_format_1_protects_its_pages",),
    ),
    Mutation(
        "accept an entry of another segment", "kvfs/format/segment.py",
        '    return int.from_bytes(segment_id[:8], "little")', "    return 0",
        ("tests/format/test_segment.py", "tests/golden"),
    ),
    Mutation(
        "accept a segment of another store", "kvfs/maintenance/rebuild.py",
        "(scan.header.segment_id, scan.header.store_id) != (segment_id, self._store_id)",
        "scan.header.segment_id != segment_id",
        ("tests/test_store_open.py::test_a_segment_of_another_store_is_not_served",),
    ),
    Mutation(
        "accept a row of another key", "kvfs/index/rows.py",
        'if check != checksum(value[8:], seed=int.from_bytes(key[:8], "little")) or', "if",
        ("tests/index/test_rows.py", "tests/fuzz"),
    ),
    Mutation(
        "wrong order of the chain", "kvfs/pages/chunk_hash.py",
        "            parent = sha(parent + tokens[start : start + step]).digest()",
        "            parent = sha(tokens[start : start + step] + parent).digest()",
        ("tests/pages/test_chunk_hash.py", "tests/golden"),
    ),
    Mutation(
        "forget the tenant's salt", "kvfs/pages/chunk_hash.py",
        'hashlib.sha256(b"kvfs chain 1\\n" + salt.encode("utf-8"))', 'hashlib.sha256(b"kvfs chain 1\\n")',
        ("tests/pages/test_chunk_hash.py", "tests/security"),
    ),
    Mutation(
        "let an extra key spell a second chunk", "kvfs/pages/chunk_hash.py",
        "(extra and extra.get(0)) or ", "",
        ("tests/pages/test_chunk_hash.py",),
    ),
    Mutation(
        "let tokens spell a key", "kvfs/pages/chunk_hash.py",
        " or tokens[:step].startswith(_KEY)", "",
        ("tests/pages/test_chunk_hash.py", "tests/lookup/test_prompt_pages_names.py"),
    ),
    Mutation(
        "number the pages of keys", "kvfs/write/appender.py",
        "0 if job.prompt.keyed else target.chunk", "target.chunk",
        ("tests/lookup/test_prompt_pages_names.py",),
    ),
    Mutation(
        "put pages of keys into rows of 32", "kvfs/lookup/prompt_pages.py",
        "identity.seed), run_length=1)", "identity.seed))",
        ("tests/lookup/test_prompt_pages_names.py",),
    ),
    Mutation(
        "end a load of keys at a page that is lost", "kvfs/transfer/load.py",
        "match.chunks if match.keyed else match.restorable(self._possible)", "match.restorable(self._possible)",
        ("tests/transfer/test_host_io_names.py",),
    ),
    Mutation(
        "store pages of SGLang whose place is not known", "kvfs/integrations/sglang/pages.py",
        "        if prefix is None:\n", "        if False:\n",
        ("tests/integrations/test_sglang.py",),
    ),
    Mutation(
        "promise layers of SGLang that did not arrive", "kvfs/integrations/sglang/linker_pages.py",
        "(result is not None and result.pages < pages)", "False",
        ("tests/integrations/test_sglang_linker.py",),
    ),
    Mutation(
        "let a load of LMCache write after its deadline", "kvfs/integrations/lmcache/tasks.py",
        "            yield not self._ended\n", "            yield True\n",
        ("tests/integrations/test_lmcache.py",),
    ),
    Mutation(
        "give out at once what does not verify", "kvfs/read/fetch.py",
        "if not same and summed[number] and b", "if False and b",
        ("tests/read/test_at_once.py",),
    ),
    Mutation(
        "ask a disk for what the page cache lacks, where none may be waited for", "kvfs/read/fetch.py",
        "        jobs = self._cached_jobs(jobs) if native is not None else []\n", "",
        ("tests/read/test_at_once.py",),
    ),
    Mutation(
        "pad objects of LMCache with what another one had", "kvfs/integrations/lmcache/objects.py",
        "                    one[size:] = bytes(kind.nbytes - size)", "                    pass",
        ("tests/integrations/test_lmcache.py",),
    ),
    Mutation(
        "ignore the deadline", "kvfs/index/gate.py",
        "            if self._files.monotonic() >= deadline:\n", "            if deadline < 0:\n",
        ("tests/crash/test_order_of_writes.py::test_the_wait_for_a_lock_ends_at_the_deadline",),
    ),
    Mutation(
        "no breaker after a timeout", "kvfs/index/environment.py",
        "        self._refused |= {write} if self._read_only else {write, True}\n", "        pass\n",
        ("tests/crash/test_kill.py::test_a_frozen_holder_of_the_index_blocks_no_other_process",),
    ),
    Mutation(
        "drop the gate's inode check", "kvfs/index/gate.py",
        "            if not self._in_place():\n", "            if self.held is None:\n",
        ("tests/security",),
    ),
    Mutation(
        "free a segment that a reader holds", "kvfs/eviction/reclaimer.py",
        "if not files.flock(fd, fcntl.LOCK_EX):", "if not files.flock(fd, fcntl.LOCK_EX) and fd < 0:",
        ("tests/test_namespace.py::test_a_match_holds_its_pages_after_the_segment_is_unlinked",
         "tests/crash/test_order_of_writes.py"),
    ),
    Mutation(
        "take the claims of others for pages", "kvfs/index/row_updates.py",
        "            if claim_holds(session, place):\n                return CLAIM\n    return None",
        "            if claim_holds(session, place):\n                return 0\n    return None",
        ("tests/crash/test_order_of_writes.py",),
    ),
    Mutation(
        "let a claim hold for ever", "kvfs/index/session.py",
        "        if not self.now_s < expires <= self.now_s + CLAIM_SECONDS:\n            return False\n", "",
        ("tests/index/test_rows.py", "tests/crash/test_order_of_writes.py"),
    ),
    Mutation(
        "the oldest of two records wins a rebuild", "kvfs/maintenance/rebuild.py",
        "key=lambda x: -x.created_us", "key=lambda x: x.created_us",
        ("tests/crash/test_order_of_writes.py",),
    ),
    Mutation(
        "serve what has expired", "kvfs/index/session.py",
        "        if extent.flags & CLAIM or (extent.expires and extent.expires <= self.now_s):",
        "        if extent.flags & CLAIM:",
        ("tests/golden", "tests/crash/test_order_of_writes.py"),
    ),
    Mutation(
        "store behind a gap", "kvfs/namespace.py",
        "        if chain and start and not present >> (start - 1) & 1:\n", "        if chain and start < 0:\n",
        ("tests/test_namespace.py::test_nothing_is_stored_behind_a_gap",),
    ),
    Mutation(
        "follow symlinks", "kvfs/system/files.py",
        "flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK", "flags | os.O_CLOEXEC | os.O_NONBLOCK",
        ("tests/security",),
    ),
    Mutation(
        "trust an index that has two names", "kvfs/index/trust.py",
        "same = same and data.st_nlink == 1", "same = same and data.st_nlink > 0",
        ("tests/security",),
    ),
    Mutation(
        "append to a segment that has two names", "kvfs/segments/writer.py",
        "            if files.fstat(fd).st_nlink > 1:\n", "            if fd < 0:\n",
        ("tests/security",),
    ),
    Mutation(
        "name what a dead writer did not sync", "kvfs/maintenance/rebuild.py",
        "            self._files.fdatasync(self._fd)\n", "            pass\n",
        ("tests/crash/test_found_by_torture.py",),
    ),
    Mutation(
        "leave unsynced what a dead process stored", "kvfs/write/active_segments.py",
        "                sync_segment(self._c.directory, row.segment_id)\n", "                pass\n",
        ("tests/write/test_active_segments_sync.py",),
    ),
    Mutation(
        "name what a power cut has torn", "kvfs/maintenance/rebuild.py",
        "whole = [e for e in entries if synced and self._is_whole(e)]", "whole = list(entries)",
        ("tests/crash/test_found_by_torture.py::test_a_page_that_a_power_cut_has_torn_is_not_skipped",),
    ),
    Mutation(
        "go on with a segment that has torn pages", "kvfs/maintenance/rebuild.py",
        "not dead and not torn and scan.appendable", "not dead and scan.appendable",
        ("tests/crash/test_found_by_torture.py::test_a_segment_with_a_torn_page_is_not_sealed_over_it",),
    ),
    Mutation(
        "seal what may not be on the disk", "kvfs/write/active_segments.py",
        'if self._c.settings.sync != "cache":  # a seal', 'if self._c.settings.sync == "":  # a seal',
        ("tests/crash/test_order_of_writes.py::test_what_a_seal_covers_is_on_the_disk_before_the_seal",),
    ),
    Mutation(
        "give away the slot of a writer that was killed", "kvfs/index/row_updates.py",
        "if place.flags & CLAIM and place.chunk_hash != wanted and", "if place.flags & CLAIM and not wanted and",
        ("tests/crash/test_found_by_torture.py::test_an_unpublished_record_of_a_killed_writer_hides_nothing_after_a_rebuild",),
    ),
    Mutation(
        "take a damaged ledger for an empty one", "kvfs/index/tables.py",
        "    if data is not None and fields is None:\n", "    if data is None and fields is not None:\n",
        ("tests/fuzz",),
    ),
    Mutation(
        "append to a segment of unknown features", "kvfs/format/segment.py",
        "    return not _HEADER.unpack(bytes(page[: _HEADER.size]))[4] & ~READ_ONLY_COMPATIBLE", "    return True",
        ("tests/golden",),
    ),
    Mutation(
        "wait for fifos", "kvfs/system/files.py",
        "flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK", "flags | os.O_CLOEXEC | os.O_NOFOLLOW",
        ("tests/security",),
    ),
    Mutation(
        "allocate what a compressed frame claims", "kvfs/format/codec.py",
        "        if claimed != raw_bytes:\n", "        if claimed < 0:\n",
        ("tests/format/test_codec.py::test_a_bomb_allocates_nothing",),
    ),
    Mutation(
        "take a decoded page for verified", "kvfs/read/assemble.py",
        "    if root_of(leaf_table(target, leaf_bytes)) != place.root:\n", "    if not target:\n",
        ("tests/format/test_codec.py::test_a_damaged_page_is_refused_and_can_be_stored_again",),
    ),
    Mutation(
        "let planes leave bytes over", "kvfs/format/codec.py",
        "    if sum(lengths) != len(source) - begin or max(lengths) > plane_bytes:\n",
        "    if max(lengths) > plane_bytes:\n",
        ("tests/format/test_codec.py::test_what_is_not_exactly_one_page_is_refused",),
    ),
    Mutation(
        "sum what is stored in place of the page", "kvfs/write/encode.py",
        "    table = record.table or leaf_table(record.payload, record.leaf_bytes)\n",
        "    table = leaf_table(payload, record.leaf_bytes)\n",
        ("tests/format/test_codec.py",),
    ),
    Mutation(
        "drop a segment whose pages were not all copied", "kvfs/write/relocate.py",
        "        if self._recode is not None and isinstance(exc, OSError):\n",
        "        if self._recode is not None and not exc:\n",
        ("tests/maintenance/test_recompress.py", "tests/crash/test_recompress.py"),
    ),
    Mutation(
        "take prompts for one another that end alike", "kvfs/pages/chunk_hash_cache.py",
        " or known[:common] != tokens[:common]:", ":",
        ("tests/pages/test_chunk_hash_cache.py",),
    ),
    Mutation(
        "remember chains of one tenant for another", "kvfs/pages/chunk_hash_cache.py",
        " if one[:2] == (seed, step) else 0", "",
        ("tests/pages/test_chunk_hash_cache.py",),
    ),
    Mutation(
        "miss the run behind those that are not there", "kvfs/lookup/search.py",
        "                if there and any(page + part in there for part in parts):\n                    return run\n",
        "                if there and any(page + part in there for part in parts):\n                    return run + 1\n",
        ("tests/lookup/test_search.py",),
    ),
    Mutation(
        "fill in what is asked for and not what is registered", "kvfs/gpu/populate.py",
        "for first, nbytes in regions.missing(run.held, run.offset, run.span, self._published[run.segment]):",
        "for first, nbytes in [(run.offset, run.span)]:",
        ("tests/gpu/test_gpu_io.py",),
    ),
    Mutation(
        "wait for a segment that does not open", "kvfs/segments/open_segments.py",
        "                opener.call(work, seconds)\n", "                opener.call(work, 3600.0)\n",
        ("tests/write/test_active_segments_hanging_writes.py",),
    ),
    Mutation(
        "leave the name of a purge mark to a power cut", "kvfs/maintenance/purge.py",
        "        self._c.marks.sync()\n", "",
        ("tests/crash/test_crash_images.py", "tests/crash/test_order_of_writes.py"),
    ),
    Mutation(
        "write a purge mark without a sync", "kvfs/directory/purge_marks.py",
        "data, sub=_FOLDER, sync_folder=False)\n\n    def sync", "data, sub=_FOLDER, durable=False)\n\n    def sync",
        ("tests/crash/test_order_of_writes.py",),
    ),
    Mutation(
        "remove a purge mark while its segment may come back", "kvfs/eviction/reclaimer.py",
        'self._c.files.fsync(self._c.directory.sub("doomed"))', 'self._c.files.fstat(self._c.directory.sub("doomed"))',
        ("tests/crash/test_order_of_writes.py",),
    ),
    Mutation(
        "rebuild what is purged", "kvfs/maintenance/rebuild.py",
        "mark = marks.read(segment_id) if segment_id in marked else None", "mark = None",
        ("tests/maintenance/test_purge.py", "tests/crash/test_crash_images.py"),
    ),
    Mutation(
        "believe access times in the future", "kvfs/directory/access_times.py",
        "            if 0 < stamp <= now:", "            if 0 < stamp:",
        ("tests/eviction/test_access_times.py",),
    ),
    Mutation(
        "free the slots that a hanging read writes to", "kvfs/transfer/load.py",
        "            try:  # the transfer does not own",
        "            transfer.own(lease)\n            try:  # the transfer does not own",
        ("tests/transfer/test_host_io_deadlines.py",),
    ),
    Mutation(
        "copy to the engine what is read behind the deadline", "kvfs/transfer/load.py",
        "            if not allowed:  # it has ended, perhaps", "            if not good:  # it has ended, perhaps",
        ("tests/transfer/test_host_io_deadlines.py",),
    ),
    Mutation(
        "sweep a name that a writer has", "kvfs/mount/names.py",
        "    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n    if is_named", "    if is_named",
        ("tests/mount/test_file_tree.py",),
    ),
    Mutation(
        "store a file with a hole where a write failed", "kvfs/mount/file_node.py",
        "draft.error = exc.errno or errno.EIO  # never", "draft.error = 0  # never",
        ("tests/mount/test_file_tree.py",),
    ),
    Mutation(
        "pull the pages of another prompt", "kvfs/remote/pull.py",
        "if page.entry.chunk_hash != prompt.hashes[at + i] or not", "if not",
        ("tests/remote/test_push_pull.py",),
    ),
    Mutation(
        "read a plain bucket although there is a key", "kvfs/remote/bucket.py",
        "if self.keys is not None and not ids:", "if False:",
        ("tests/remote/test_encryption.py",),
    ),
    Mutation(
        "take an encrypted object that was cut at a block", "kvfs/remote/encryption.py",
        'return number.to_bytes(11, "big") + bytes([last])', 'return number.to_bytes(11, "big") + bytes([0])',
        ("tests/remote/test_encryption.py",),
    ),
)  # fmt: skip

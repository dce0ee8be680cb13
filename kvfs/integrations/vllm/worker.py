"""The worker's half: copies pages between the engine's blocks and the store, outside of the engine's threads."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from kvfs.errors import ConfigError, KvfsError
from kvfs.integrations.vllm.manager import LoadSpec, SaveSpec
from kvfs.integrations.vllm.metrics import Metrics
from kvfs.integrations.vllm.peers import PeerCopies, Reused, stored_hashes
from kvfs.integrations.vllm.settings import VllmSettings
from kvfs.integrations.vllm.views import AttachedEngine, AttachedGroup
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.transfer.handle import Transfer
from kvfs.transfer.host_io import HostIO
from kvfs.types import SavePlan, TransferState
from kvfs.types import TransferResult as TransferredPages

logger = init_logger(f"vllm.{__name__}")
IDLE_SECONDS = 0.002  # longest wait of a step without a forward pass: a loop that spins starves the transfer threads
GATHER_SECONDS = 0.01  # longest wait of such a step for further loads, after one has ended: about one step
AT_ONCE_SECONDS = 0.025  # longest time in which such a step copies loads in host memory itself: about one step
NEXT_SECONDS = 0.002  # between two of these loads
PREFILL_TOKENS = 1024  # a step of more lasts longer than the copies of a GiB: nothing waits for those
LATE_SECONDS = 1.0  # time after its deadline in which a load may still end by itself
FLUSH_SECONDS = 1.0  # longest wait of a flush; pages that are not copied by then are not stored


class _Publication(NamedTuple):
    """Pages for other ranks."""

    hashes: bytes
    units: dict[str, list[int]]
    first: int  # chunk


class _TransferJob(NamedTuple):
    transfer: Transfer | None  # None: nothing to copy, refused, or ended
    load: bool
    nbytes: int
    began: float
    blocks: tuple[int, ...] = ()  # of a load in an engine with one cache group
    first: int = 0  # number of the first of them in the prompt
    tokens: int = 0  # at which a load ends; 0: of the store alone, where none is shorter than planned
    publish: _Publication | None = None  # what a load brings
    result: TransferredPages | None = None  # of a load that took no transfer


class KvfsWorker(OffloadingWorker):
    """Owns the transfers of one rank; delegates copies to ``HostIO``. Called by one thread of the engine's worker.

    A save is reported as finished once its blocks are free; its pages may be published later.
    """

    def __init__(
        self, io: HostIO, engine: Sequence[AttachedEngine], page_tokens: int, settings: VllmSettings,
        keeps_prefix: bool = False, peers: PeerCopies | None = None,
    ) -> None:  # fmt: skip
        self._io, self._engine, self._settings = io, engine, settings
        self._peers = peers
        self._page_tokens = page_tokens
        self._keeps_prefix = keeps_prefix  # whether the engine accepts a load of which the end is missing
        self.step_tokens = 0  # that the engine computes in the step that begins
        self.lost: set[int] = set()  # blocks that loads have not filled, to be reported with the next results
        self._jobs: dict[int, _TransferJob] = {}
        self._ended = threading.Event()  # set when a load ends
        self.idle = False  # whether this step computes nothing: then ``load_at_once`` and ``wait_idle`` follow
        self._kept: list[tuple[int, PrefixMatch, LoadSpec, dict[str, list[int]]]] = []  # loads for ``load_at_once``
        self._late: list[Transfer] = []  # withdrawn loads whose disk has not answered yet
        self._publishing: list[Transfer] = []  # saves whose blocks are free, without a result yet
        self._attached = [a for e in engine for a in e.attached]
        self._page_bytes = {a.stored.name: io.page_bytes(a.stored.name) for a in self._attached}
        self._on_gpu = self._attached[0].device.memory.startswith("cuda")
        self._logged: set[str] = set()  # kinds of warnings that were logged
        self.metrics = Metrics()

    # -- saves -------------------------------------------------------------------------------

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        transfer, nbytes = None, 0
        if isinstance(dst_spec, SaveSpec) and self._is_ours(dst_spec):
            plan, units = self._placed(src_spec, dst_spec)
            nbytes = sum(len(chunks) * self._page_bytes[name] for name, chunks in plan.missing.items())
            try:
                transfer = self._io.save(
                    plan, units, after=self._event(), deadline=self._settings.store_seconds, attempt=dst_spec.attempt,
                    gentle=self._generating(),
                )  # fmt: skip
            except (KvfsError, OSError) as exc:
                self._refused("save", exc)
            if dst_spec.publish:
                self._publish(src_spec, dst_spec)
        self._jobs[job_id] = _TransferJob(transfer, False, nbytes, time.monotonic())
        return True

    def _publish(self, src: GPULoadStoreSpec, dst: SaveSpec) -> None:
        """Offer what a step has computed to the other ranks, whether or not it is saved."""
        units: dict[str, list[int]] = {}
        begin = dst.plan.chunks
        for engine, ids, first in self._blocks(src):
            numbers = dst.chunks.get(engine.group.index, ())
            blocks = self._of_chunks(engine, numbers, ids, first)
            if numbers and blocks:
                begin = min(begin, min(numbers) * engine.group.chunk_tokens // self._page_tokens)
            for a in engine.attached:
                units[a.stored.name] = self._units(engine, a, blocks, dst.plan.chunks)
        self._offer(dst.plan.hashes, units, begin)

    def _offer(self, hashes: Sequence[bytes], units: dict[str, list[int]], first: int) -> None:
        if self._peers is None:
            return
        try:
            self._peers.publish(hashes, units, first, self._event())
        except KvfsError as exc:
            self._warn_once("publish", "kvfs: pages are not offered to other ranks: %s", exc)

    def reuses(self, reused: Reused) -> None:
        """The engine is about to write to these blocks: no rank may read them any more."""
        if self._peers is None:
            return
        try:
            self._peers.retract(reused)
        except KvfsError as exc:  # a pull of them does not verify
            self._warn_once("retract", "kvfs: blocks are not taken back from other ranks: %s", exc)

    def _is_ours(self, spec: SaveSpec) -> bool:
        ours = spec.plan.namespace == self._io.namespace
        if not ours:
            self.metrics.add("saves_refused")
            logger.error_once(
                "kvfs: scheduler and worker disagree on the identity of the model (a model changed its config when it "
                "was loaded): nothing is stored. Start the engine without KvfsConnector, and report the model"
            )
        return ours

    def _placed(self, src: GPULoadStoreSpec, dst: SaveSpec) -> tuple[SavePlan, dict[str, list[int]]]:
        """The plan without the pages of which the engine freed some blocks, and the units of the others."""
        missing: dict[str, tuple[int, ...]] = {}
        units: dict[str, list[int]] = {}
        for engine, ids, first in self._blocks(src):
            blocks = self._of_chunks(engine, dst.chunks.get(engine.group.index, ()), ids, first)
            for a in engine.attached:
                name = a.stored.name
                wanted = dst.plan.missing.get(name, ())
                units[name] = self._units(engine, a, blocks, wanted[-1] + 1 if wanted else 0)
                missing[name] = tuple(page for page in wanted if self._is_whole(a, units[name], page))
                self.metrics.add("pages_incomplete", len(wanted) - len(missing[name]))
        plan = SavePlan(dst.plan.chunks, dst.plan.hashes, missing, dst.plan.namespace)
        return plan, units

    def _of_chunks(self, engine: AttachedEngine, chunks: Sequence[int], ids: list[int], first: int) -> dict[int, int]:
        """Number of a block in the prompt -> block. ``ids``: of these chunks, from block ``first`` on.

        The engine leaves out blocks that it has freed: those before ``first``. If it left out others, none is known.
        """
        per = engine.group.chunk_tokens // engine.group.block_tokens
        numbers = [chunk * per + i for chunk in chunks for i in range(per)]
        numbers = [number for number in numbers if number >= first] if len(numbers) != len(ids) else numbers
        return dict(zip(numbers, ids, strict=True)) if len(numbers) == len(ids) else {}

    @staticmethod
    def _is_whole(a: AttachedGroup, units: list[int], page: int) -> bool:
        return all(units[unit] >= 0 for unit in a.device.unit_range(a.layout, page))

    # -- loads -------------------------------------------------------------------------------

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        assert isinstance(src_spec, LoadSpec)
        assert not expedited, "vLLM would compute from this load whatever its outcome: settings refuses that"
        placed = self._blocks(dst_spec)
        units: dict[str, list[int]] = {}
        nbytes = 0
        for engine, ids, first in placed:
            blocks = dict(enumerate(ids, first))
            for a in engine.attached:
                units[a.stored.name] = self._units(engine, a, blocks, src_spec.chunks)
                nbytes += len(ids) * self._page_bytes[a.stored.name] * engine.group.block_tokens // self._page_tokens
        (_, ids, first), *_ = placed
        kept = tuple(ids) if self._keeps_prefix else ()
        tokens, publish = src_spec.chunks * self._page_tokens if src_spec.plans else 0, None
        if src_spec.hashes and self._peers is not None:
            begin = min(first * engine.group.block_tokens for engine, _, first in placed) // self._page_tokens
            publish = _Publication(src_spec.hashes, units, begin)
        transfer = None
        self._late = [late for late in self._late if not late.done.is_set()]
        if self.idle and src_spec.match is not None and not (self._on_gpu or self._late):
            self._kept.append((job_id, src_spec.match, src_spec, units))
        else:
            transfer = self._begin_load(src_spec, units)
        self._jobs[job_id] = _TransferJob(transfer, True, nbytes, time.monotonic(), kept, first, tokens, publish)
        return True

    def load_at_once(self) -> None:
        """In a step that computes nothing: load what has to wait for nothing in this thread, and begin the others.

        Threads would take turns of the interpreter with it.
        """
        kept, self._kept = self._kept, []
        results: list[TransferredPages | None] = [None] * len(kept)
        if kept:
            seconds = min(AT_ONCE_SECONDS, self._settings.load_seconds)
            with contextlib.suppress(KvfsError, OSError):  # ``load`` tells which
                results = self._io.load_at_once([(match, units) for _, match, _, units in kept], seconds)
        for (job_id, _, spec, units), result in zip(kept, results, strict=True):
            transfer = self._begin_load(spec, units) if result is None else None
            self._jobs[job_id] = self._jobs[job_id]._replace(transfer=transfer, result=result)

    def _begin_load(self, spec: LoadSpec, units: dict[str, list[int]]) -> Transfer | None:
        """None where it is refused."""
        try:
            if self._late:  # this one would wait behind it until its own deadline
                raise TimeoutError("the disk has not answered an earlier load yet")
            return self._transfer(spec, units)
        except (KvfsError, OSError) as exc:
            self._refused("load", exc)
            return None

    def _transfer(self, spec: LoadSpec, units: dict[str, list[int]]) -> Transfer:
        def ended(_: object) -> None:
            self._ended.set()

        seconds = self._settings.load_seconds
        if spec.match is not None:
            return self._io.load(
                spec.match, units, after=self._event(), deadline=seconds, gentle=self._generating(), on_done=ended
            )
        plan = spec.plans.get(self._peers.place.worker) if self._peers is not None else None
        if self._peers is None or plan is None:
            raise ConfigError("the scheduler planned a copy between ranks for a worker that is none")
        return self._peers.load(plan, units, self._event(), seconds, ended)

    def _generating(self) -> bool:
        """Whether requests generate tokens, and next to no prompt is computed: short steps, with copies in each."""
        return 0 < self.step_tokens <= PREFILL_TOKENS

    # -- both --------------------------------------------------------------------------------

    def _blocks(self, spec: GPULoadStoreSpec) -> list[tuple[AttachedEngine, list[int], int]]:
        """(group of the engine, its blocks, number of the first block in the request) of a transfer."""
        ids = spec.block_ids.tolist()
        sizes = spec.group_sizes if spec.group_sizes is not None else [len(ids)]
        firsts = spec.block_indices if spec.block_indices is not None else [0] * len(sizes)
        found, at = [], 0
        for engine, size, first in zip(self._engine, sizes, firsts, strict=True):
            found.append((engine, ids[at : at + size], first))
            at += size
        return found

    def _units(self, engine: AttachedEngine, a: AttachedGroup, blocks: Mapping[int, int], pages: int) -> list[int]:
        """Units of the first ``pages`` pages of a prompt, from blocks by their number in it; -1 where there is none."""
        tokens = engine.group.block_tokens
        if a.stored.kind != "tokens":  # the block that ends with the page, or in which a shorter page ends
            return [blocks.get(((page + 1) * self._page_tokens - 1) // tokens, -1) for page in range(pages)]
        per = a.units_per_block
        ids = [blocks.get(number, -1) for number in range(-(-pages * self._page_tokens // tokens))]
        if per == 1:
            return ids
        return [unit for block in ids for unit in (range(block * per, (block + 1) * per) if block >= 0 else [-1] * per)]

    def _event(self) -> Any:
        """An event after the work that wrote, or last used, the blocks; None on a CPU."""
        if not self._on_gpu:
            return None  # the engine's thread has done that work
        event = torch.cuda.Event()
        event.record()
        return event

    def _refused(self, what: str, exc: Exception) -> None:
        self.metrics.add(f"{what}s_refused")
        self._warn_once(f"{what} {type(exc).__name__}", "kvfs: a %s was refused: %s", what, exc)

    def _warn_once(self, kind: str, message: str, *args: object) -> None:
        """Log each kind once. vLLM's ``warning_once`` logs again for other arguments, and keeps them all."""
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(message, *args)

    def wait_idle(self) -> None:
        """In a step that computes nothing: leave the GIL to the transfers, until some have ended.

        Loads that end shortly after one another are reported together, so that one step computes all of their requests.
        """
        if self._jobs and not self._over():
            self._ended.wait(IDLE_SECONDS)
        self._ended.clear()
        end = time.monotonic() + GATHER_SECONDS
        while self._over() and (loads := self._loading()):
            left = end - time.monotonic()
            if left <= 0:
                break
            loads[-1].done.wait(min(left, NEXT_SECONDS))  # each end in between would take a turn of the interpreter
            if len(self._loading()) == len(loads):
                break

    def _loading(self) -> list[Transfer]:
        """Loads that have not ended."""
        jobs = self._jobs.values()
        return [
            job.transfer for job in jobs if job.load and job.transfer is not None and not job.transfer.done.is_set()
        ]

    def _over(self) -> bool:
        return any(_is_over(job) for job in self._jobs.values())

    def get_finished(self) -> list[TransferResult]:
        self._count_published()
        return [self._finish(job_id) for job_id in [n for n, job in self._jobs.items() if self._has_ended(job)]]

    def _has_ended(self, job: _TransferJob) -> bool:
        """Whether a job is over. Withdraws a load that is late, even if its disk has not answered yet."""
        if _is_over(job):
            return True
        late = job.load and time.monotonic() - job.began > self._settings.load_seconds + LATE_SECONDS
        if not late or job.transfer is None or not job.transfer.withdraw(0):
            return False
        self._late.append(job.transfer)
        return True

    def _finish(self, job_id: int) -> TransferResult:
        job = self._jobs.pop(job_id)
        seconds = time.monotonic() - job.began
        if not job.load:
            if job.transfer is not None:
                self._publishing.append(job.transfer)
            return TransferResult(job_id, True, job.nbytes if job.transfer is not None else None, seconds)
        result = job.transfer.result if job.transfer is not None else job.result
        whole = job.result is not None or (job.transfer is not None and job.transfer.state is TransferState.DONE)
        if result is not None and result.tokens < job.tokens:
            whole = False  # other ranks took pages back before this load was planned
        if result is not None and job.publish is not None:
            loaded = stored_hashes(job.publish.hashes)[: result.tokens // self._page_tokens]
            self._offer(loaded, job.publish.units, job.publish.first)
        if result is not None:
            self.metrics.add("pages_loaded", result.pages)
            for tier, tokens in result.tiers.items():
                self.metrics.add(f"tokens_loaded_{tier.name.lower()}", tokens)
            if not whole:
                self.metrics.add("pages_not_loaded", result.declined)
                reason = result.reason or "other ranks took pages back"
                logger.warning("kvfs: %d pages were not loaded (%s): computing them", result.declined, reason)
        elif job.transfer is not None:
            logger.warning("kvfs: a load did not end within %s s: computing its tokens", self._settings.load_seconds)
        if result is not None and not whole and job.blocks:
            filled = result.tokens // self._engine[0].group.block_tokens - job.first
            if filled > 0:
                self.lost.update(job.blocks[filled:])
                return TransferResult(job_id, True, None, seconds)
        return TransferResult(job_id, whole, job.nbytes if whole else None, seconds)

    def _count_published(self) -> None:
        left = []
        reasons: Counter[str] = Counter()
        for transfer in self._publishing:
            if transfer.result is None:
                left.append(transfer)
                continue
            self.metrics.add("pages_stored", transfer.result.pages)
            self.metrics.add("pages_not_stored", transfer.result.declined)
            if transfer.result.declined:
                reasons[transfer.result.reason] += transfer.result.declined
        self._publishing = left
        for reason, pages in reasons.items():
            if reason not in self._logged and not os.path.isdir(self._settings.path):
                self._warn_once(
                    "removed", "kvfs: the store %s was removed: nothing is stored or found until the engine restarts",
                    self._settings.path,
                )  # fmt: skip
            self._warn_once(reason, "kvfs: pages were not stored (%s, %d the first time)", reason, pages)

    def wait(self, job_ids: set[int]) -> None:
        """Wait until the blocks of these jobs may be reused: at most two seconds, and never for a disk."""
        busy = [self._jobs[n] for n in job_ids if n in self._jobs and not _is_over(self._jobs[n])]
        loads = [job.transfer for job in busy if job.load and job.transfer is not None]
        saves = [job.transfer for job in busy if not job.load and job.transfer is not None]
        for load in loads:
            load.withdraw(0)  # its blocks are not reused until it is reported
        end = time.monotonic() + FLUSH_SECONDS
        late = [save for save in saves if not save.source_free.wait(max(0.0, end - time.monotonic()))]
        end = time.monotonic() + FLUSH_SECONDS
        for save in late:
            save.withdraw(max(0.0, end - time.monotonic()))

    def shutdown(self) -> None:
        if self._peers is not None:
            self._peers.close()
        self._io.close()


def _is_over(job: _TransferJob) -> bool:
    return job.transfer is None or (job.transfer.done if job.load else job.transfer.source_free).is_set()

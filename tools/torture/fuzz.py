"""fuzz: every parser is given mutated bytes, most of them with valid checksums.

An input may be refused in the documented way, or accepted if it verifies. Anything else is a finding: another
exception, accepted bytes that do not verify, endless reading, memory beyond a bound. Inputs with a new answer are kept
and mutated further; ``--corpus`` writes them, and findings, to a folder.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import resource
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tools.torture.images import Image, TooMuchError
from tools.torture.judge import Judge
from tools.torture.parsers import TARGETS, Target, Unverified

MEMORY_BYTES = 512 << 20  # that the process may allocate
CPU_SECONDS_MAX = 3.0  # of one input, on the slowest machine
POOL_MAX = 300
GROWN_BYTES_MAX = 8 << 10  # of an input that is mutated further; segments start larger
ROUNDS = {"segment": 20, "index": 20, "store": 1}  # executions before the next target; others are fast
CORPUS_MAX, PACKED_BYTES_MAX = 12, 3000  # inputs of one target that a run adds, and their packed size
CORPUS = Path(__file__).resolve().parents[2] / "tests" / "fuzz" / "corpus"
_DETAIL = re.compile(r"'[^']*'|\"[^\"]*\"|[0-9a-f]{8,}|[0-9]+|/\S+")


class Answer(NamedTuple):
    """Result of an input: a kind of failure ("" if none) and a short text, equal for similar inputs."""

    failure: str
    text: str


def execute(target: Target, image: Image) -> Answer:
    try:
        return Answer("", target.read(image))
    except target.errors as exc:
        return Answer("", f"{type(exc).__name__} {_DETAIL.sub('', str(exc))[:60]}")
    except Unverified as exc:
        return Answer("wrong", str(exc))
    except TooMuchError as exc:
        return Answer("blocked", str(exc))
    except MemoryError:
        return Answer("over", "memory")
    except Exception as exc:
        place = traceback.extract_tb(exc.__traceback__)[-1]
        return Answer("raised", f"{type(exc).__name__} {_DETAIL.sub('', str(exc))[:60]} at {place.name}")


def corpus_of(name: str, folder: Path = CORPUS) -> list[tuple[str, Image]]:
    """(note, input) of a target's corpus."""
    file = folder / f"{name}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(item["note"], Image.unpacked(item)) for item in map(json.loads, lines)]


class Pool:
    """Inputs of one target, and their answers."""

    def __init__(self, target: Target, corpus: Path) -> None:
        self.target = target
        self.images = [*target.seeds(), *(image for _, image in corpus_of(target.name, corpus))]
        self.answers: dict[Answer, Image] = {}
        self.executions = 0

    def step(self, chance: random.Random) -> Answer:
        image = self.target.mutate(chance, chance.choice(self.images))
        self.executions += 1
        started = time.process_time()
        answer = execute(self.target, image)
        if time.process_time() - started > CPU_SECONDS_MAX:
            answer = Answer("blocked", f"more than {CPU_SECONDS_MAX} s of CPU time")
        if answer not in self.answers:
            self.answers[answer] = image
            small = len(image.pieces) > 1 or image.size < GROWN_BYTES_MAX
            if not answer.failure and small and len(self.images) < POOL_MAX:
                self.images.append(image)
        return answer


def run(seed: int, seconds: float, judge: Judge, only: tuple[str, ...], corpus: Path | None) -> Counter[str]:
    """Fuzz until the time is up; executions per target."""
    _limit_memory()
    chance = random.Random(seed)
    pools = [Pool(target, CORPUS) for name, target in TARGETS.items() if not only or name in only]
    weights = [pool.target.weight for pool in pools]
    end = time.monotonic() + seconds
    seen: set[tuple[str, Answer]] = set()
    while time.monotonic() < end:
        (pool,) = chance.choices(pools, weights)
        for _ in range(ROUNDS.get(pool.target.name, 200)):
            answer = pool.step(chance)
            if answer.failure and (pool.target.name, answer) not in seen:
                seen.add((pool.target.name, answer))
                judge.found(answer.failure, f"{pool.target.name}, seed {seed}: {answer.text}")
    if corpus is not None:
        for pool in pools:
            _write(corpus, pool)
    return Counter({pool.target.name: pool.executions for pool in pools})


def _limit_memory() -> None:
    status = Path("/proc/self/status").read_text()
    (used_kib,) = re.findall(r"^VmData:\s+(\d+) kB", status, re.MULTILINE)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, ((int(used_kib) << 10) + MEMORY_BYTES, hard))


def _write(folder: Path, pool: Pool) -> None:
    """Write one input for each answer."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {hashlib.sha256(repr(i.packed()).encode()).digest() for _, i in corpus_of(pool.target.name, folder)}
    with (folder / f"{pool.target.name}.jsonl").open("a") as lines:
        for answer, image in sorted(pool.answers.items(), key=lambda item: not item[0].failure)[:CORPUS_MAX]:
            packed = image.packed()
            if len(str(packed)) < PACKED_BYTES_MAX and hashlib.sha256(repr(packed).encode()).digest() not in known:
                note = f"{answer.failure}: {answer.text}" if answer.failure else answer.text
                lines.write(json.dumps({"note": note, **packed}) + "\n")

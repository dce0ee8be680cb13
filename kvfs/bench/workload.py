"""What a benchmark asks: sessions of requests whose prompts share prefixes as those of real users do.

A session's prompt grows: each request sends all that was said before and something new. Token ids are random and
seeded, so that two runs ask the same and no text has to be tokenized.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from kvfs.errors import ConfigError

TRACE_BLOCK_TOKENS = 512  # of a hash id in a trace of the Mooncake format
LINE_BYTES_MAX = 1 << 20  # of a trace
VOCABULARY = 30_000  # token ids are drawn below this: the vocabularies of usual models have more


class Turn(NamedTuple):
    """One request of a session: tokens that are new in its prompt, and how many to generate."""

    tokens: list[int]
    output_tokens: int


class Session(NamedTuple):
    """Requests one after the other, each after the answer to the one before. ``at``: seconds after the start, or 0."""

    turns: list[Turn]
    at: float = 0.0


class Shape(NamedTuple):
    """Sizes of a generated workload, in tokens; ``sessions`` and ``turns`` count."""

    sessions: int = 32
    turns: int = 4
    shared: int = 1024
    first: int = 2048
    turn: int = 256
    output: int = 128


def multi_turn(shape: Shape, seed: int) -> Iterator[Session]:
    """Conversations that begin with one system prompt of ``shared`` tokens and ``first`` tokens of their own.

    Each further turn adds ``turn`` tokens to what was said and answered before.
    """
    draw = random.Random(seed)
    system = _tokens(draw, shape.shared)
    for _ in range(shape.sessions):
        first = Turn(system + _tokens(draw, shape.first), shape.output)
        yield Session([first, *(Turn(_tokens(draw, shape.turn), shape.output) for _ in range(shape.turns - 1))])


def long_documents(shape: Shape, seed: int) -> Iterator[Session]:
    """``sessions`` documents of ``first`` tokens, about each of which ``turns`` questions are asked.

    Each question is a request of its own; the order is shuffled, so that other documents come between.
    """
    draw = random.Random(seed)
    documents = [_tokens(draw, shape.first) for _ in range(shape.sessions)]
    asked = [number for number in range(shape.sessions) for _ in range(shape.turns)]
    draw.shuffle(asked)
    for number in asked:
        yield Session([Turn(documents[number] + _tokens(draw, shape.turn), shape.output)])


def shared_prefixes(shape: Shape, seed: int) -> Iterator[Session]:
    """``sessions`` requests: one of ``turns`` prefixes of ``shared`` tokens, then ``first`` tokens of their own."""
    draw = random.Random(seed)
    prefixes = [_tokens(draw, shape.shared) for _ in range(shape.turns)]
    for _ in range(shape.sessions):
        yield Session([Turn(draw.choice(prefixes) + _tokens(draw, shape.first), shape.output)])


def trace(path: str, seed: int, *, speed: float, limit: int | None) -> Iterator[Session]:
    """Requests of a trace of the Mooncake format at their times divided by ``speed``; at most ``limit``.

    One JSON object per line: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (of blocks of 512
    tokens; equal ids: equal prefixes). ConfigError names a line that cannot be used, or a file without any.
    """
    try:
        lines = open(path, "rb")  # noqa: SIM115  the block below closes it
    except OSError as exc:
        raise ConfigError(f"cannot read {path} ({exc.strerror}): name a trace that is a readable file") from None
    with lines:
        number = 0
        for number, line in enumerate(iter(lambda: lines.readline(LINE_BYTES_MAX), b""), 1):
            if limit is not None and number > limit:
                return
            try:
                body = json.loads(line)
                at, length, output = (body[name] for name in ("timestamp", "input_length", "output_length"))
                blocks = body["hash_ids"]
                right = all(type(n) is int and n >= 0 for n in (length, output, *blocks)) and 0 <= at < math.inf
            except (ValueError, KeyError, TypeError, RecursionError):
                right = False
            if not right or not 0 < length <= len(blocks) * TRACE_BLOCK_TOKENS:
                raise ConfigError(
                    f"{path}, line {number}: not an object with timestamp, input_length, output_length and hash_ids "
                    "of blocks of 512 tokens: correct or remove it"
                )
            tokens = [t for block in blocks for t in _tokens(random.Random(f"{seed} {block}"), TRACE_BLOCK_TOKENS)]
            yield Session([Turn(tokens[:length], max(1, output))], at / 1000 / speed)
        if not number:
            raise ConfigError(f"{path} is empty: name a trace with one JSON object per line")


def _tokens(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(1, VOCABULARY), k=count)

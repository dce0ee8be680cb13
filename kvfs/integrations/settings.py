"""Checks of the settings that several adapters have under the same names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvfs.directory.config import parse_duration, parse_size
from kvfs.errors import ConfigError
from kvfs.format.codec import parse as parse_codec

SHARE = ("", "engines")
THREADS_MAX = 64
SECONDS_MAX = 3600


def check_known(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """ConfigError for the first name that is no setting. ``where``: what the operator wrote the settings into."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(f"{where} has {unknown[0]!r}: pass some of {', '.join(sorted(known))}")


def check_value(name: str, value: Any, where: str, *, seconds_max: int = SECONDS_MAX, why: str = "") -> None:
    """ConfigError if a setting has a value that no adapter takes; names that only one adapter has are checked there.

    ``seconds_max``: of deadlines of transfers; ``why``: the reason, if that is less than usual.
    """
    where = f"{name} in {where}"
    if name in ("weights_id", "name") and not isinstance(value, str):
        raise ConfigError(f"{where} is {value!r}: pass text")
    if name == "threads" and (type(value) is not int or not 1 <= value <= THREADS_MAX):
        raise ConfigError(f"{where} is {value!r}: pass 1 to {THREADS_MAX}")
    if name == "share" and value not in SHARE:
        raise ConfigError(f'{where} is {value!r}: pass "engines" to share pages with other engines, or leave it out')
    if name in ("store_seconds", "load_seconds") and (type(value) not in (int, float) or not 0 < value <= seconds_max):
        raise ConfigError(f"{where} is {value!r}: pass seconds, above 0 and at most {seconds_max}{why}")
    if name == "ring_bytes" or (name == "capacity" and value is not None):
        parse_size(value, where)
    if name == "ttl" and value is not None:
        parse_duration(value, where)
    if name == "codec" and value is not None:
        parse_codec(value)

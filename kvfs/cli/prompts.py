"""Prompts from files: token ids as text, JSON or u32 words, or text with a tokenizer. Reads are bounded."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvfs.cli.app import FILE
from kvfs.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
#: bytes of a prompt file: 16 Mi token ids as text, with separators
PROMPT_BYTES_MAX = 256 << 20
FORMATS = ("auto", "ids", "json", "bin", "text")
_KEYS = ("token_ids", "input_ids", "prompt_token_ids", "tokens", "ids")


def prompt_options(function: F) -> F:
    """The options that say how to read a prompt file."""
    return click.option(
        "--format", "kind", type=click.Choice(FORMATS), default="auto", show_default=True,
        help="ids: numbers as text; json: a list, or an object with token_ids; bin: u32 little endian; text.",
    )(tokenizer_option(function))  # fmt: skip


def tokenizer_option(function: F) -> F:
    return click.option(
        "--tokenizer",
        type=FILE,
        metavar="PATH",
        help="tokenizer.json for a prompt that is text (needs the tokenizers package).",
    )(function)


def need_prompt(prompt: str | None, ref: str | None, kind: str, tokenizer: str | None) -> None:
    """UsageError for options of a prompt where none is given: `rm chat -n code` does not concern code."""
    if prompt is None and (ref is not None or kind != FORMATS[0] or tokenizer is not None):
        raise click.UsageError("-n, --format and --tokenizer belong to --prompt: add it, or leave them out")


def read_prompt(file: str, kind: str, tokenizer: str | None) -> array[int]:
    """Token ids of a prompt file (- is stdin). ConfigError that names the file if it holds anything else."""
    data = _read(file)
    if kind == "auto":
        kind = _guess(file, data, tokenizer)
    if kind == "bin":
        if len(data) % 4:
            raise ConfigError(
                f"{file} has {len(data)} bytes: token ids as u32 take a multiple of 4; name another --format"
            )
        ids = array("I", data)
        if sys.byteorder == "big":
            ids.byteswap()
        return ids
    try:
        words = data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not UTF-8 text: pass --format bin if it holds token ids as u32") from None
    if kind == "text":
        return _checked(file, _tokenize(words, tokenizer))
    if kind == "json":
        return _checked(file, _from_json(file, words))
    try:
        numbers = [int(word) for word in words.replace(",", " ").split()]
    except ValueError:
        raise ConfigError(
            f"{file} holds something that is not a number: give token ids, or pass --tokenizer tokenizer.json for text"
        ) from None
    return _checked(file, numbers)


def _read(file: str) -> bytes:
    if file == "-":
        data = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1)
    else:
        try:
            with open(file, "rb") as stream:
                data = stream.read(PROMPT_BYTES_MAX + 1)
        except OSError as exc:
            raise ConfigError(f"{file}: {exc.strerror}; give a file with a prompt, or - for stdin") from None
    if len(data) > PROMPT_BYTES_MAX:
        raise ConfigError(
            f"{file} has more than {PROMPT_BYTES_MAX} bytes, more than any prompt: give a file of token ids"
        )
    return data


def _guess(file: str, data: bytes, tokenizer: str | None) -> str:
    suffix = Path(file).suffix.lower()
    if suffix == ".bin":
        return "bin"
    if suffix == ".json" or data.lstrip()[:1] in (b"[", b"{"):
        return "json" if tokenizer is None or suffix == ".json" else "text"
    return "ids" if tokenizer is None else "text"


def _from_json(file: str, words: str) -> Any:
    try:
        body = json.loads(words)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{file} is not JSON ({exc}): name another --format, or write a list of token ids") from None
    if isinstance(body, dict):
        body = next((body[key] for key in _KEYS if key in body), None)
    if not isinstance(body, list):
        raise ConfigError(
            f"{file} holds no list of token ids: give a list, or an object with one of {', '.join(_KEYS)}"
        )
    return body


def _checked(file: str, ids: Any) -> array[int]:
    if any(type(i) is not int for i in ids):
        raise ConfigError(f"{file} holds something that is not an integer: give a flat list of token ids")
    try:
        return array("I", ids)
    except OverflowError:
        raise ConfigError(f"{file} holds a number outside [0, 2**32): give token ids") from None


def _tokenize(words: str, tokenizer: str | None) -> list[int]:
    if tokenizer is None:
        raise ConfigError("a text prompt needs the tokenizer of its model: pass --tokenizer tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(
            "--tokenizer needs the tokenizers package: pip install tokenizers, or pass token ids"
        ) from None
    try:
        encoder = Tokenizer.from_file(tokenizer)
    except Exception as exc:  # the package raises bare Exception
        raise ConfigError(
            f"{tokenizer} cannot be read as a tokenizer.json ({exc}): name the tokenizer.json of the model"
        ) from None
    return list(encoder.encode(words).ids)

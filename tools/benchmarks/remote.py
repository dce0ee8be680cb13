"""remote: a push, a pull, and a fetch by the bucket process, against bare requests for as many bytes.

    python -m tools.benchmarks.remote --url s3://BUCKET/PREFIX --size 2GiB --rounds 3

Credentials are those of ``kvfs push``. Bare requests come from as many threads as ``remote.requests`` gives a push or a
pull; what they bring is not verified, and not stored unless the row says "write": into a new file per object, as a pull
must write, too. Each of ``--objects`` is a size for them: 16MiB is that of kvfs, the others show what another layout
would gain. Everything below the prefix is removed at the end.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click

import kvfs
from kvfs.directory import config_file
from kvfs.directory.config import REMOTE_SECONDS, Remote
from kvfs.remote.object_store import ObjectStore
from kvfs.remote.urls import open_object_store
from kvfs.system.files import Files
from tools.benchmarks.case import MIB, Case, Payload, Size, size_text
from tools.benchmarks.measure import BenchError, Contender, Sample, Stopwatch, back_memory, interleave, rate_ratio
from tools.benchmarks.report import Report, Table, rates

PAGE = 2 * MIB  # 16 tokens of a model of 8B with grouped heads: 8 pages make an object of 16 MiB


class Bare:
    """Requests for ``total`` bytes in objects of one size, and nothing else."""

    def __init__(self, objects: ObjectStore, prefix: str, size: int, total: int, requests: int) -> None:
        self._objects, self._size, self._total, self._requests = objects, size, total, requests
        self._prefix, self._data = prefix, os.urandom(size)
        self._round = itertools.count()
        self._names: list[str] = []

    def put(self) -> Sample:
        back_memory(2 * self._total)
        number = next(self._round)
        self._names = [
            f"{self._prefix}bare-{self._size}/{number}/{i}" for i in range(max(1, self._total // self._size))
        ]
        return self._all(lambda name: self._objects.put_new(name, self._data))

    def get(self) -> Sample:
        def fetch(name: str) -> bool:
            found = self._objects.get(name, 0, self._size)
            return found is not None and len(found.data) == self._size

        return self._all(fetch)

    def get_and_write(self, folder: Path) -> Sample:
        back_memory(2 * self._total)

        def fetch(name: str) -> bool:
            found = self._objects.get(name, 0, self._size)
            return found is not None and (folder / name.replace("/", "-")).write_bytes(found.data) == self._size

        try:
            return self._all(fetch)
        finally:
            for name in self._names:
                (folder / name.replace("/", "-")).unlink(missing_ok=True)

    def _all(self, request: object) -> Sample:
        watch = Stopwatch()
        with ThreadPoolExecutor(self._requests) as pool, watch:
            if not all(pool.map(request, self._names)):  # type: ignore[arg-type]
                raise BenchError("a bare request failed")
        return watch.sample(len(self._names) * self._size)


@contextmanager
def store_at(path: Path, url: str, capacity: int, requests: int, key_file: str = "") -> Iterator[kvfs.Store]:
    kvfs.open(path, capacity=capacity).close()
    for key, value in (("url", url), ("requests", str(requests)), ("key_file", key_file)):
        config_file.change(str(path), f"remote.{key}", value, Files())
    with kvfs.open(path) as store:
        yield store


def new_key(folder: Path) -> str:
    """A file with a key that encrypts objects."""
    file = folder / "key"
    file.touch(0o600)
    file.write_text(os.urandom(32).hex())
    return str(file)


class Hosts:
    """A store that pushes its prompts, each time below another prefix, and empty stores that pull them."""

    def __init__(self, folder: Path, url: str, case: Case, requests: int, key_file: str) -> None:
        self._folder, self._url, self._case, self._requests, self._key_file = folder, url, case, requests, key_file
        self._capacity = 4 * case.size_bytes + (64 << 20)
        self._round = itertools.count()
        self._latest = url
        with store_at(folder / "first", url, self._capacity, requests, key_file) as store:
            payload = Payload(case)
            for prompt in range(case.prompts):
                case.namespace(store).put(case.tokens(prompt), payload.of(prompt))

    def push(self) -> Sample:
        back_memory(2 * self._case.size_bytes)
        self._latest = f"{self._url}/push-{next(self._round)}"
        watch = Stopwatch()
        with self._store_at(self._folder / "first") as store:
            name = case_name(store)
            with watch:
                done = store.push([name])
        if done.stored != done.pages or not done.pages:
            raise BenchError(f"the push stored {done.stored} of {done.pages} pages: {done.problems}")
        return watch.sample(self._case.size_bytes)

    def _store_at(self, path: Path) -> AbstractContextManager[kvfs.Store]:
        return store_at(path, self._latest, self._capacity, self._requests, self._key_file)

    def pull(self) -> Sample:
        return self._arrive(lambda store, namespace, tokens: bool(store.pull(namespace, tokens).stored))

    def fetch(self) -> Sample:
        return self._arrive(_fetched, ready=_asked)

    def _arrive(self, bring: Bring, ready: Callable[[kvfs.Store, kvfs.Namespace], None] = lambda *_: None) -> Sample:
        back_memory(2 * self._case.size_bytes)
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            watch = Stopwatch()
            with self._store_at(Path(folder) / "second") as store:
                namespace = self._case.namespace(store)
                ready(store, namespace)
                with watch:
                    for prompt in range(self._case.prompts):
                        if not bring(store, namespace, self._case.tokens(prompt)):
                            raise BenchError("a prompt did not come")
                matched = [namespace.match(self._case.tokens(p)) for p in range(self._case.prompts)]
                short = [m for m in matched if m.tokens != self._case.prompt_pages * self._case.page_tokens]
                for match in matched:
                    match.close()
                if short:
                    raise BenchError(f"{len(short)} prompts came short, the first with {short[0].tokens} tokens")
        return watch.sample(self._case.size_bytes)


Bring: TypeAlias = Callable[[kvfs.Store, kvfs.Namespace, Any], bool]


def _fetched(store: kvfs.Store, namespace: kvfs.Namespace, tokens: Any) -> bool:
    fetch = store.fetch(namespace, tokens)
    return fetch is not None and fetch.wait(300.0) and not fetch.failed


def _asked(store: kvfs.Store, namespace: kvfs.Namespace) -> None:
    """The process has started, and the bucket has been asked once."""
    _fetched(store, namespace, [1] * namespace.layout.page_tokens)


def case_name(store: kvfs.Store) -> str:
    (described,) = store.catalog.described()
    return described.digest.hex()


@click.command(help=__doc__)
@click.option("--url", required=True, help="A bucket with a prefix for this run alone.")
@click.option("--size", type=Size(), default="1GiB", show_default=True, help="Bytes of a push and of a pull.")
@click.option("--prompt", type=Size(), default="256MiB", show_default=True, help="Bytes of one prompt.")
@click.option("--objects", default="16MiB", show_default=True, help="Sizes of bare objects, separated by commas.")
@click.option("--requests", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--encrypt", is_flag=True, help="Objects are encrypted; bare ones are not.")
@click.option("--path", type=click.Path(exists=True, file_okay=False, path_type=Path), default=tempfile.gettempdir())
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
def main(
    url: str, size: int, prompt: int, objects: str, requests: int, rounds: int, encrypt: bool, path: Path,
    json_path: Path | None,
) -> None:  # fmt: skip
    sizes = [Size().convert(text, None, None) for text in objects.split(",")]
    url = url.rstrip("/")
    case = Case.of(size, PAGE, prompt, 4, 1)
    bucket = open_object_store(Remote(url, requests, REMOTE_SECONDS))
    report = Report(
        "remote", {"url": url, "size": size_text(case.size_bytes), "requests": requests, "rounds": rounds}, json_path
    )
    try:
        with tempfile.TemporaryDirectory(dir=path) as folder:
            hosts = Hosts(Path(folder), url, case, requests, new_key(Path(folder)) if encrypt else "")
            bares = [(f"bare {size_text(s)}", Bare(bucket, "bare/", s, case.size_bytes, requests)) for s in sizes]
            runs = [Contender("push", hosts.push), Contender("pull", hosts.pull), Contender("fetch", hosts.fetch)]
            for name, bare in bares:
                runs += [Contender(f"put {name}", bare.put), Contender(f"get {name}", bare.get)]
            write = partial(bares[0][1].get_and_write, Path(folder))
            runs.insert(5, Contender(f"get, write {bares[0][0]}", write))
            done = interleave(runs, rounds)
        table = Table("remote: requests of one bucket")
        bases = dict.fromkeys(("pull", "fetch"), "get, write") | dict.fromkeys(("push", "put"), "put")
        for name, samples in done.items():
            base = f"{bases.get(name.partition(' bare')[0], 'get')} {bares[0][0]}"
            table.add(what=name, **rates(samples), of=base, ratio=rate_ratio(samples, done[base]))
        report.show(table)
    finally:
        for found in list(bucket.listing("")):
            bucket.delete(found.name)
        bucket.close()
        report.save()


if __name__ == "__main__":
    main()

"""two_hosts: two hosts and a bucket in Ceph, each in a network namespace of its own, with a link of a rate and a delay.

    python -m tools.benchmarks.two_hosts --ceph .ceph --rate 1gbit --delay 20ms --size 256MiB --rounds 3

Host A stores prompts and pushes them; host B, with an empty store, restores them: every byte is compared. Baselines are
bare puts and bare range reads of as many bytes in the same objects, by as many threads, which verify and store nothing,
or only write a file per object; "by prompt" waits for the objects of a prompt before those of the next one. At the end
of each round both hosts push the same prompts at once: each object must be stored once. "with this": of the cores that
were busy, those with the hosts, Ceph and the relay of a delay. Needs root, iproute2 and what
``python -m tools.ceph install .ceph`` has made.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import click

import kvfs
from kvfs.directory.config import REMOTE_SECONDS, Remote
from kvfs.remote.urls import open_object_store
from tools.benchmarks.case import MIB, Case, Payload, Size, out_buffer, size_text
from tools.benchmarks.cores import CoreWatch, Run
from tools.benchmarks.crew import Crew
from tools.benchmarks.measure import BenchError, Spread, back_memory, rate_ratio
from tools.benchmarks.network import GATEWAY, Network, Relay, enter
from tools.benchmarks.remote import case_name, new_key, store_at
from tools.benchmarks.report import Report, Table, Value, rates
from tools.ceph import Ceph

PAGE = 2 * MIB  # 16 tokens of a model of 8B with grouped heads: 8 pages make an object of 16 MiB
OBJECT_BYTES = 16 * MIB
BUCKET = "kvfs-two-hosts"
CAPACITY = 128 << 30  # of a store, which sets the size of its segments: 256 MiB, as hosts have it
Order = tuple[str, str]  # name of a method of Host, URL


class Delay:
    """The relay of the gateway's namespace, in a child; its port."""

    def __init__(self, target: int, seconds: float) -> None:
        self._target, self._seconds = target, seconds

    def __enter__(self) -> Delay:
        enter(GATEWAY)
        self._relay = Relay(self._target, self._seconds)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def run(self, order: Any) -> int:
        return self._relay.port


class Host:
    """One host: a child in its namespace, with a store in a folder of its own."""

    def __init__(
        self, namespace: str, folder: Path, environment: dict[str, str], case: Case, requests: int, key_file: str
    ) -> None:
        self._namespace, self._folder, self._environment = namespace, folder, environment
        self._case, self._requests, self._key_file = case, requests, key_file
        self._round = itertools.count()

    def __enter__(self) -> Host:
        enter(self._namespace)
        os.environ.update(self._environment)
        self._payload = Payload(self._case)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def run(self, order: Order) -> Any:
        what, url = order
        back_memory(2 * self._case.size_bytes)
        return getattr(self, what)(url)

    @contextlib.contextmanager
    def _store(self, url: str, name: str) -> Iterator[kvfs.Store]:
        with store_at(self._folder / name, url, CAPACITY, self._requests, self._key_file) as store:
            yield store

    def fill(self, url: str) -> None:
        with self._store(url, "own") as store:
            for prompt in range(self._case.prompts):
                self._case.namespace(store).put(self._case.tokens(prompt), self._payload.of(prompt))

    def push(self, url: str) -> tuple[Run, int, int]:
        """The run, and how many pages and objects were new."""
        watch = CoreWatch(os.getppid())
        with self._store(url, "own") as store:
            name = case_name(store)
            with watch:
                done = store.push([name])
        if done.failed or done.left_out or done.stored + done.present != done.pages:
            raise BenchError(f"the push stored {done.stored} of {done.pages} pages: {done.problems}")
        return watch.run(self._case.size_bytes), done.stored, done.objects

    def restore(self, url: str) -> Run:
        """Pull all prompts into an empty store, one after the other."""
        prompts = [self._case.tokens(i) for i in range(self._case.prompts)]
        return self._restore(url, lambda store, namespace: [store.pull(namespace, one) for one in prompts])

    def restore_all(self, url: str) -> Run:
        """Pull the namespace into an empty store."""
        return self._restore(url, lambda store, namespace: store.pull(namespace))

    def _restore(self, url: str, pull: Callable[[kvfs.Store, kvfs.Namespace], object]) -> Run:
        """Pull, by the clock. Then compare every byte, without it."""
        watch = CoreWatch(os.getppid())
        with tempfile.TemporaryDirectory(dir=self._folder) as folder, self._store(url, f"{folder}/empty") as store:
            namespace = self._case.namespace(store)
            with watch:
                pull(store, namespace)
            out = out_buffer(self._case.prompt_bytes)
            for prompt in range(self._case.prompts):
                with namespace.match(self._case.tokens(prompt)) as match:
                    if match.tokens != self._case.prompt_pages * self._case.page_tokens:
                        raise BenchError(f"prompt {prompt} came short: {match.tokens} tokens")
                    namespace.get(match, out)
                self._payload.check(out, prompt)
        return watch.run(self._case.size_bytes)

    def read(self, url: str) -> Run:
        return self._read(url, None)

    def read_prompts(self, url: str) -> Run:
        return self._read(url, None, at_once=self._case.prompt_bytes // OBJECT_BYTES)

    def read_and_write(self, url: str) -> Run:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            return self._read(url, Path(folder))

    def _read(self, url: str, folder: Path | None, at_once: int | None = None) -> Run:
        """``at_once``: this many objects, and when all of them have come the next ones; None: without a pause."""
        bucket = open_object_store(Remote(url, self._requests, REMOTE_SECONDS))
        names = [(found.name, found.size) for found in bucket.listing("") if "/pages/" in found.name]

        def fetch(number: int) -> int:
            name, size = names[number]
            found = bucket.get(name, 0, size)
            if found is None or len(found.data) != size:
                raise BenchError("a bare request failed")
            if folder is not None:
                (folder / str(number)).write_bytes(found.data)
            return size

        watch = CoreWatch(os.getppid())
        with ThreadPoolExecutor(self._requests) as pool, watch:
            step = at_once or len(names)
            total = sum(sum(pool.map(fetch, range(len(names))[at : at + step])) for at in range(0, len(names), step))
        if total < self._case.size_bytes:
            raise BenchError(f"{total} bytes in the bucket, in place of {self._case.size_bytes}")
        return watch.run(total)

    def write(self, url: str) -> Run:
        bucket = open_object_store(Remote(url, self._requests, REMOTE_SECONDS))
        data, number = os.urandom(OBJECT_BYTES), next(self._round)
        names = [f"bare/{number}/{i}" for i in range(self._case.size_bytes // len(data))]
        watch = CoreWatch(os.getppid())
        with ThreadPoolExecutor(self._requests) as pool, watch:
            if not all(pool.map(lambda name: bucket.put_new(name, data), names)):
                raise BenchError("a bare request failed")
        for name in names:
            bucket.delete(name)
        return watch.run(len(names) * len(data))

    def objects(self, url: str) -> int:
        bucket = open_object_store(Remote(url, self._requests, REMOTE_SECONDS))
        return sum("/pages/" in found.name for found in bucket.listing(""))

    def clear(self, url: str) -> None:
        bucket = open_object_store(Remote(url, self._requests, REMOTE_SECONDS))
        with ThreadPoolExecutor(self._requests) as pool:
            list(pool.map(lambda found: bucket.delete(found.name), list(bucket.listing(""))))


class Fleet(NamedTuple):
    """Two hosts that reach one gateway."""

    namespaces: list[str]  # of each host
    environments: list[dict[str, str]]  # of each host: what kvfs needs to find the gateway
    delayed_by: str


@contextlib.contextmanager
def fleet(root: Path, rate: str, delay: float) -> Iterator[Fleet]:
    """A cluster of what ``root`` holds, with the bucket BUCKET, behind links of a rate and a round trip in seconds."""
    with contextlib.ExitStack() as stack:
        network = Network(("a", "b"), rate, delay)
        stack.callback(network.close)
        ceph = stack.enter_context(contextlib.closing(Ceph(root, inside=("ip", "netns", "exec", GATEWAY))))
        ceph.make_bucket(BUCKET)
        port = ceph.port
        if delay and not network.has_netem:
            (port,) = stack.enter_context(Crew([Delay(ceph.port, delay / 2)])).run(None)
        urls = [f"http://{network.address(i)}:{port}" for i in range(len(network.hosts))]
        environments = [ceph.environment() | {"AWS_ENDPOINT_URL": url} for url in urls]
        by = "none is added" if not delay else "netem" if network.has_netem else "a relay"
        yield Fleet(network.hosts, environments, by)


def both(crews: list[Crew[Any]], order: Order) -> list[Any]:
    for crew in crews:
        crew.start(order)
    return [crew.collect()[0] for crew in crews]


class Seconds(click.ParamType[float]):
    """Seconds, as "20ms"."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(str(value).removesuffix("ms")) / 1e3
        except ValueError:
            self.fail(f"{value!r} is no time, such as 20ms", param, ctx)


@click.command(help=__doc__)
@click.option("--ceph", "root", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".ceph")
@click.option("--rate", default="1gbit", show_default=True, help="Of each link, as of tc.")
@click.option("--delay", type=Seconds(), default="20ms", show_default=True, help="Of a round trip; 0ms: none is added.")
@click.option("--size", type=Size(), default="256MiB", show_default=True, help="Bytes that each host stores.")
@click.option("--prompt", type=Size(), default="64MiB", show_default=True, help="Bytes of one prompt.")
@click.option("--requests", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--encrypt", is_flag=True, help="Objects are encrypted; bare puts are not.")
@click.option("--path", type=click.Path(exists=True, file_okay=False, path_type=Path), default=tempfile.gettempdir())
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
def main(
    root: Path, rate: str, delay: float, size: int, prompt: int, requests: int, rounds: int, encrypt: bool, path: Path,
    json_path: Path | None,
) -> None:  # fmt: skip
    case = Case.of(size, PAGE, prompt, 4, 1)
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(fleet(root, rate, delay))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=path)))
        key = new_key(folder) if encrypt else ""
        crews: list[Crew[Any]] = []
        for name, environment in zip(hosts.namespaces, hosts.environments, strict=True):
            (folder / name).mkdir()
            job = Host(name, folder / name, environment, case, requests, key)
            crews.append(stack.enter_context(Crew([job])))
        a, b = crews
        options: dict[str, Value] = {
            "rate": rate,
            "delay_ms": delay * 1e3,
            "delay_by": hosts.delayed_by,
            "size": size_text(case.size_bytes),
        }
        options |= {"prompt": size_text(case.prompt_bytes), "requests": requests, "rounds": rounds, "encrypt": encrypt}
        report = Report("two_hosts", options, json_path)
        both(crews, ("fill", f"s3://{BUCKET}/none"))
        samples: dict[str, list[Run]] = {}
        once = []
        for number in range(rounds + 1):
            url = f"s3://{BUCKET}/round-{number}"
            (wrote,) = a.run(("write", url))
            ((pushed, _, _),) = a.run(("push", url))
            runs = {"bare puts": wrote, "push": pushed}
            orders = {
                "bare reads": "read", "bare reads, by prompt": "read_prompts",
                "bare reads into files": "read_and_write", "restore, by prompt": "restore",
                "restore, as a whole": "restore_all",
            }  # fmt: skip
            for name, what in list(orders.items())[:: 1 if number % 2 else -1]:
                runs[name] = b.run((what, url))[0]
            a.run(("clear", url))
            (_, first, made), (_, second, more) = both(crews, ("push", url))
            (there,) = a.run(("objects", url))
            a.run(("clear", url))
            pages = case.prompts * case.prompt_pages
            if first + second != pages or made + more != there:
                raise BenchError(f"{first} and {second} pages of {pages}, {made} and {more} objects of {there}")
            once.append(f"{made} + {more} = {there}")
            if number:
                for name, sample in runs.items():
                    samples.setdefault(name, []).append(sample)
        table = Table("two_hosts: A pushes, B restores into an empty store, every byte compared")
        for name, base in (
            ("bare puts", "bare puts"), ("push", "bare puts"), ("bare reads", "bare reads"),
            ("restore, by prompt", "bare reads"), ("restore, as a whole", "bare reads"),
            ("bare reads, by prompt", "bare reads"), ("restore, by prompt", "bare reads, by prompt"),
            ("bare reads into files", "bare reads"), ("restore, by prompt", "bare reads into files"),
            ("restore, as a whole", "bare reads into files"),
        ):  # fmt: skip
            runs_of = samples[name]
            cores = {
                "cores busy": Spread.of([run.cores for run in runs_of]),
                "with this": Spread.of([run.cores_of_ours for run in runs_of]),
            }
            ratio = rate_ratio(runs_of, samples[base])
            table.add(what=name, **rates(runs_of), **cores, of=base, ratio=ratio)
        table.notes.append(f"objects that A and B stored when both pushed the same prompts at once: {', '.join(once)}")
        report.show(table)
        report.save()


if __name__ == "__main__":
    main()

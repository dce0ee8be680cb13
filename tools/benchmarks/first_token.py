"""first_token: a prompt that host A has computed, on host B: restored from the bucket, against computed again.

    python -m tools.benchmarks.first_token --ceph .ceph --rate 1gbit --delay 20ms --tokens 512,2048 --rounds 3

Both hosts have the same Llama of transformers with random weights, on the CPU, in float32. A computes a prompt, saves
it and pushes it to a bucket in Ceph. B has an empty store: the clock runs from the request to the first token, over the
question to the bucket, the pull, the load and the computation of what is left; then over the computation of the whole
prompt, without a store. Both must choose the same token. Needs what ``two_hosts`` needs, and the extra transformers.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import click

import kvfs
from tools.benchmarks.crew import Crew
from tools.benchmarks.measure import BenchError, Sample, Spread, Stopwatch, time_ratio
from tools.benchmarks.network import enter
from tools.benchmarks.remote import store_at
from tools.benchmarks.report import Report, Table
from tools.benchmarks.two_hosts import BUCKET, Seconds, fleet

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, VOCABULARY = 12, 1024, 16, 8, 2816, 1024
REVISION = "bench"  # both hosts make the same weights
CAPACITY, REQUESTS = 2 << 30, 8
FETCH_SECONDS = 300.0


class Order(NamedTuple):
    what: str  # a method of Engine
    url: str
    tokens: int
    seed: int


class Answer(NamedTuple):
    sample: Sample
    token: int
    restored: int = 0  # tokens


class Engine:
    """One host: a child in its namespace, with a model."""

    def __init__(self, namespace: str, folder: Path, environment: dict[str, str]) -> None:
        self._namespace, self._folder, self._environment = namespace, folder, environment

    def __enter__(self) -> Engine:
        enter(self._namespace)
        os.environ.update(self._environment)
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=1 << 16, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
        self._model: Any = LlamaForCausalLM(config).eval()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def run(self, order: Order) -> Answer:
        import torch

        generator = torch.Generator().manual_seed(order.seed)
        ids = torch.randint(1, VOCABULARY, (1, order.tokens), generator=generator)
        with torch.inference_mode():
            answer: Answer = getattr(self, order.what)(ids, order.url)
        return answer

    def compute(self, ids: Any, url: str) -> Answer:
        watch = Stopwatch()
        with watch:
            token = self._next(ids, None)
        return Answer(watch.sample(), token)

    def publish(self, ids: Any, url: str) -> Answer:
        """Compute a prompt, save it and push it."""
        from kvfs.integrations.transformers import namespace_for

        watch = Stopwatch()
        with store_at(self._folder / f"own-{url[-8:]}", url, CAPACITY, REQUESTS) as store, watch:
            cache = namespace_for(store, self._model, revision=REVISION)
            past, _ = cache.load(ids)
            token = self._next(ids, past)
            cache.save(ids, past)
            done = store.push([cache.namespace.identity.digest.hex()])
        if done.failed or not done.stored:
            raise BenchError(f"the push stored {done.stored} of {done.pages} pages: {done.problems}")
        return Answer(watch.sample(done.nbytes), token)

    def restore(self, ids: Any, url: str) -> Answer:
        from kvfs.integrations.transformers import namespace_for

        watch = Stopwatch()
        with (
            tempfile.TemporaryDirectory(dir=self._folder) as folder,
            store_at(Path(folder) / "empty", url, CAPACITY, REQUESTS) as store,
        ):
            cache = namespace_for(store, self._model, revision=REVISION)
            self._fetch(store, cache.namespace, [VOCABULARY] * cache.namespace.layout.page_tokens)  # the process starts
            with watch:
                self._fetch(store, cache.namespace, ids[0].tolist())
                past, restored = cache.load(ids)
                token = self._next(ids[:, restored:], past)
        return Answer(watch.sample(), token, restored)

    def _fetch(self, store: kvfs.Store, namespace: kvfs.Namespace, tokens: list[int]) -> None:
        fetch = store.fetch(namespace, tokens)
        if fetch is None or not fetch.wait(FETCH_SECONDS) or fetch.failed:
            raise BenchError(f"the fetch did not end well: {fetch and fetch.failed}")

    def _next(self, ids: Any, past: Any) -> int:
        return int(self._model(ids, past_key_values=past, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())


@click.command(help=__doc__)
@click.option("--ceph", "root", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".ceph")
@click.option("--rate", default="1gbit", show_default=True, help="Of each link, as of tc.")
@click.option("--delay", type=Seconds(), default="20ms", show_default=True, help="Of a round trip; 0ms: none is added.")
@click.option("--tokens", default="512,2048", show_default=True, help="Lengths of prompts.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--path", type=click.Path(exists=True, file_okay=False, path_type=Path), default=tempfile.gettempdir())
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
def main(root: Path, rate: str, delay: float, tokens: str, rounds: int, path: Path, json_path: Path | None) -> None:
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(fleet(root, rate, delay))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=path)))
        crews = []
        for name, environment in zip(hosts.namespaces, hosts.environments, strict=True):
            (folder / name).mkdir()
            crews.append(stack.enter_context(Crew([Engine(name, folder / name, environment)])))
        a, b = crews
        report = Report(
            "first_token",
            {"rate": rate, "delay_ms": delay * 1e3, "delay_by": hosts.delayed_by, "rounds": rounds},
            json_path,
        )
        table = Table("first_token: seconds from the request to the first token on host B")
        for count in map(int, tokens.split(",")):
            computed: list[Sample] = []
            restored: list[Sample] = []
            nbytes = kept = 0
            for number in range(rounds + 1):
                url = f"s3://{BUCKET}/{count:04x}{number:04x}"
                (first,) = a.run(Order("publish", url, count, number))
                (again,) = b.run(Order("compute", url, count, number))
                (found,) = b.run(Order("restore", url, count, number))
                if not first.token == again.token == found.token:
                    raise BenchError(f"tokens differ: {first.token} on A, {again.token} and {found.token} on B")
                nbytes, kept = first.sample.nbytes, found.restored
                if number:
                    computed.append(again.sample)
                    restored.append(found.sample)
            table.add(
                tokens=count, restored=kept, MB=nbytes / 1e6, compute_s=Spread.of([s.seconds for s in computed]),
                restore_s=Spread.of([s.seconds for s in restored]), ratio=time_ratio(computed, restored),
                cpu_s_computed=Spread.of([s.cpu_seconds for s in computed]),
                cpu_s_restored=Spread.of([s.cpu_seconds for s in restored]),
            )  # fmt: skip
        report.show(table)
        report.save()


if __name__ == "__main__":
    main()

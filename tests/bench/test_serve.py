"""``kvfs bench serve``: what it asks, what it counts of a server with known delays and hits, and how it fails."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvfs.bench import report, target, workload
from kvfs.bench.driver import Run
from kvfs.bench.target import Answer, OpenAITarget, StoreTarget
from kvfs.bench.workload import Session, Shape, Turn
from kvfs.cli.app import App
from kvfs.cli.main import run as run_command
from kvfs.errors import ConfigError
from tests.stores import tiny

web = pytest.importorskip("aiohttp.web", reason="aiohttp is not installed")
BLOCK = 16
SMALL = Shape(sessions=6, turns=3, shared=32, first=64, turn=16, output=4)


class FakeServer:
    """Streams ``tokens`` events of one token each, ``first`` and then ``each`` seconds apart; hits in whole blocks.

    The first one takes up to ``varied`` times longer or shorter.
    """

    def __init__(self, first: float = 0.0, each: float = 0.0, broken: str = "", varied: float = 0.0) -> None:
        self.first, self.each, self.broken, self.varied = first, each, broken, varied
        self._draw = random.Random(1)
        self.prompts: list[list[int]] = []
        self.cached: list[int] = []
        self.times: list[list[float]] = []  # of each request: when it came, when each token was sent; time.monotonic
        self.running = self.running_max = 0
        self._seen: set[tuple[int, ...]] = set()

    async def models(self, request: Any) -> Any:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def completions(self, request: Any) -> Any:
        times = [time.monotonic()]
        self.times.append(times)
        body = await request.json()
        assert body["stream"] and body["ignore_eos"] and body["model"] == "tiny"
        prompt = body["prompt"]
        if self.broken == "status":
            return web.Response(status=503, text="overloaded")
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        self.prompts.append(prompt)
        heads = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        hit = next((n for n, head in enumerate(heads) if head not in self._seen), len(heads)) * BLOCK
        self._seen.update(heads)
        self.cached.append(hit)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for n in range(body["max_tokens"]):
            delay = self.each if n else self.first * (1 + self.varied * self._draw.uniform(-1, 1))
            await asyncio.sleep(delay)
            if self.broken == "event" and n == 1:
                await answer.write(b"data: {not json\n\n")
                break
            if self.broken == "hang" and n == 1:
                await asyncio.sleep(3600)
            event = {"choices": [{"text": "a", "token_ids": [7000 + n]}]}
            times.append(time.monotonic())
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        if self.broken != "silent":
            usage["prompt_tokens_details"] = {"cached_tokens": hit}
        await answer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        self.running -= 1
        return answer

    @contextmanager
    def url(self) -> Iterator[str]:
        """The server runs in a thread of its own as long as the block."""
        loop, ready, port = asyncio.new_event_loop(), threading.Event(), [0]
        runners: list[Any] = []

        async def start() -> None:
            app = web.Application()
            app.add_routes([web.get("/v1/models", self.models), web.post("/v1/completions", self.completions)])
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            runners.append(runner)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port[0] = site._server.sockets[0].getsockname()[1]
            ready.set()

        def serve() -> None:
            loop.run_until_complete(start())
            loop.run_forever()
            loop.run_until_complete(runners[0].cleanup())
            loop.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert ready.wait(60)
        try:
            yield f"http://127.0.0.1:{port[0]}/v1"
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(60)


def drive(server: FakeServer, sessions: list[Session], *, concurrency: int = 2, timeout: float = 60.0) -> Run:
    async def go(url: str) -> Run:
        target = await OpenAITarget.connect(url, None, timeout)
        made = Run(target, 1, lambda progress: None)
        try:
            await made.closed(sessions, concurrency)
        finally:
            await target.close()
        return made

    with server.url() as url:
        return asyncio.run(go(url))


# -- what is asked ------------------------------------------------------------------------------------


def test_conversations_share_a_system_prompt_and_grow_by_what_was_answered() -> None:
    server = FakeServer()
    drive(server, list(workload.multi_turn(SMALL, 1)), concurrency=1)
    assert len(server.prompts) == 18
    assert len({tuple(p[:32]) for p in server.prompts}) == 1, "the system prompt"
    for session in range(6):
        turns = server.prompts[3 * session : 3 * session + 3]
        for before, after in pairwise(turns):
            assert after[: len(before)] == before
            assert after[len(before) : len(before) + 4] == [7000, 7001, 7002, 7003], "the ids that the server generated"
            assert len(after) == len(before) + 4 + 16


def test_equal_seeds_ask_the_same_and_other_seeds_something_else() -> None:
    for make in (workload.multi_turn, workload.long_documents, workload.shared_prefixes):
        assert list(make(SMALL, 1)) == list(make(SMALL, 1)) != list(make(SMALL, 2))


def test_each_document_is_asked_its_questions_in_shuffled_order() -> None:
    sessions = list(workload.long_documents(SMALL, 1))
    documents = [tuple(s.turns[0].tokens[:64]) for s in sessions]
    assert len(sessions) == 18 and sorted(documents.count(d) for d in set(documents)) == [3] * 6
    assert any(a != b for a, b in pairwise(documents)), "other documents come between"


def test_blocks_of_a_trace_with_equal_ids_have_equal_tokens(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [(0, 700, [1, 2]), (1500, 1024, [1, 3]), (3000, 600, [4, 5])]
    file.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": n, "output_length": 5, "hash_ids": ids}) + "\n"
            for at, n, ids in rows
        )
    )
    first, second, third = workload.trace(str(file), 1, speed=2.0, limit=None)
    assert [s.at for s in (first, second, third)] == [0.0, 0.75, 1.5]
    a, b, c = (s.turns[0].tokens for s in (first, second, third))
    assert (
        (len(a), len(b), len(c)) == (700, 1024, 600)
        and a[:512] == b[:512]
        and a[512:] != b[512:700]
        and a[:512] != c[:512]
    )
    assert len(list(workload.trace(str(file), 1, speed=1.0, limit=2))) == 2


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": "x"}',
             '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "[" * 100_000,
             '{"timestamp": 1e400, "input_length": 5, "output_length": 1, "hash_ids": [1]}'],
)  # fmt: skip
def test_a_broken_line_of_a_trace_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    good = json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]})
    file.write_text(f"{good}\n{line}\n")
    with pytest.raises(ConfigError, match=r"line 2: .*correct or remove it"):
        list(workload.trace(str(file), 1, speed=1.0, limit=None))


def test_a_trace_without_a_request_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").touch()
    with pytest.raises(ConfigError, match="is empty: name a trace"):
        list(workload.trace(str(tmp_path / "trace.jsonl"), 1, speed=1.0, limit=None))


# -- what is counted ----------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 4])
def test_hits_and_tokens_are_those_of_the_server(concurrency: int) -> None:
    server = FakeServer()
    found = report.summary(drive(server, list(workload.multi_turn(SMALL, 1)), concurrency=concurrency), {})
    assert (found["requests"], found["failed"], found["output_tokens"]) == (18, 0, 72)
    assert found["prompt_tokens"] == sum(map(len, server.prompts)) and found["cached_tokens"] == sum(server.cached) > 0
    assert found["hit_ratio"] == round(sum(server.cached) / sum(map(len, server.prompts)), 4)
    assert server.running_max <= concurrency


def test_times_are_at_least_the_delays_of_the_server() -> None:
    server = FakeServer(first=0.2, each=0.05)
    made = drive(server, [Session([Turn([1] * 16, 4)])], concurrency=1)
    found = report.summary(made, {})
    assert found["ttft"]["p50"] >= 0.2 and found["e2e"]["p50"] >= 0.35
    assert sum(b - a for a, b in pairwise(made.done[0].answer.token_times)) >= 0.1 and found["itl"]["mean"] > 0


@pytest.mark.parametrize("concurrency", [1, 8])
def test_times_of_the_client_follow_those_of_the_server(concurrency: int) -> None:
    """By the clock of both, whatever the machine does: a request is sent before it comes, a token after it was sent."""
    server = FakeServer(first=0.02, each=0.005)
    answers = [d.answer for d in drive(server, list(workload.multi_turn(SMALL, 1)), concurrency=concurrency).done]
    assert len(answers) == len(server.times) == 18
    # sorted, the n-th of one is compared with the n-th of the other: which request is whose is not needed
    steps = [
        sorted(a.sent for a in answers),
        sorted(times[0] for times in server.times),
        sorted(times[1] for times in server.times),
        sorted(a.token_times[0] for a in answers),
        sorted(a.ended for a in answers),
    ]
    assert all(list(one) == sorted(one) for one in zip(*steps, strict=True))
    assert all(a.token_times[0] - a.sent >= 0.02 for a in answers)


def test_a_server_that_says_nothing_of_hits_has_no_hit_ratio() -> None:
    found = report.summary(drive(FakeServer(broken="silent"), [Session([Turn([1] * 32, 1)])]), {})
    assert found["hit_ratio"] is None and found["cached_tokens"] is None and found["failed"] == 0


@pytest.mark.parametrize(
    ("broken", "error"),
    [("status", "HTTP 503: overloaded"), ("event", "JSONDecodeError"), ("hang", "no end within 1 s")],
)
def test_a_request_that_fails_is_counted_and_ends_its_session(broken: str, error: str) -> None:
    made = drive(FakeServer(broken=broken), list(workload.multi_turn(SMALL._replace(sessions=2), 1)), timeout=1.0)
    found = report.summary(made, {})
    assert (found["requests"], found["failed"]) == (2, 2) and found["ttft"] is None
    assert all(e.startswith(error) for e in found["errors"])


def test_percentiles_are_those_of_nearest_rank() -> None:
    found = report.spread([float(n) for n in range(1, 101)])
    assert found == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert report.spread([3.0]) == {"mean": 3.0, "p50": 3.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    assert report.spread([]) is None


class Instant:
    """A target that answers at once, and notes when it was asked."""

    def __init__(self) -> None:
        self.times: list[float] = []

    async def send(self, prompt: Any, output_tokens: int) -> Answer:
        now = asyncio.get_running_loop().time()
        self.times.append(now)
        return Answer(now, [now], now, len(prompt), 1, 0, [])

    async def close(self) -> None:
        return None


def test_sessions_begin_at_their_times_or_at_the_rate() -> None:
    sessions = [Session([Turn([1], 1)], at) for at in (0.0, 0.05, 0.2)]
    target = Instant()
    made = Run(target, 1, lambda progress: None)
    asyncio.run(made.open(sessions, None))
    gaps = [b - target.times[0] for b in target.times]
    assert gaps[1] >= 0.04 and gaps[2] >= 0.19 and len(made.done) == 3
    many = [Session([Turn([1], 1)])] * 200
    target = Instant()
    made = Run(target, 1, lambda progress: None)
    asyncio.run(made.open(many, 1000.0))
    assert len(made.done) == 200 and made.ended - made.began >= 0.1


def test_the_library_is_a_target_whose_second_turn_hits(tmp_path: Path) -> None:
    target = StoreTarget.open(str(tmp_path / "store"), tiny(page_tokens=16))
    made = Run(target, 1, lambda progress: None)

    async def go() -> None:
        try:
            await made.closed(workload.multi_turn(SMALL, 1), 2)
        finally:
            await target.close()

    asyncio.run(go())
    found = report.summary(made, {})
    assert found["failed"] == 0 and found["requests"] == 18
    later = [d.answer for d in made.done if d.turn]
    assert all(a.cached_tokens >= 64 + 32 for a in later if a.cached_tokens is not None) and len(later) == 12


def test_the_page_shows_the_figures_and_escapes_what_the_server_said() -> None:
    made = drive(FakeServer(), list(workload.multi_turn(SMALL, 1)))
    found = report.summary(made, {"model": "<script>"})
    found["errors"] = {"<b>bad</b>": 1}
    text = report.page(made, found)
    assert "<script>" not in text and "<b>" not in text and text.count("<svg") == 3 and text.count("<circle") == 3 * 18


# -- the command --------------------------------------------------------------------------------------


def test_the_command_reports_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--sessions", "2", "--turns", "2", "--shared", "16", "--first", "16", "--turn", "16", "--output", "2"]
    with FakeServer().url() as url:
        for name in ("run.html", "run.json"):
            arguments = ["bench", "serve", "--target", url, *small, "--report", str(tmp_path / name)]
            assert run_command(App(), arguments) == 0
    assert "first token" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "run.json").read_text())["each"]) == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.html", "run.json"]


def test_a_server_that_hangs_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(target, "CONNECT_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        assert run_command(App(), ["bench", "serve", "--target", url]) == 2
    error = capsys.readouterr().err
    assert "does not answer (no answer within 0 s)" in error and error.count("\n") == 1


def test_a_server_that_fails_each_request_is_an_error_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(broken="status").url() as url:
        assert run_command(App(), ["bench", "serve", "--target", url, "--sessions", "2"]) == 1
    seen = capsys.readouterr()
    assert "error     2: HTTP 503: overloaded" in seen.out and "cached" not in seen.out
    assert seen.err == "kvfs: no request succeeded: see the errors above\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "http://127.0.0.1:9/v1"], "does not answer (Connection refused): is --target right"),
        (["--target", "store", "--report", "missing/x.html"], "in a directory that exists and is writable"),
        (["--target", "store", "--report", "folder.html"], "name a file"),
        (["--target", "localhost:8000"], "pass http://HOST:PORT/v1, or store"),
        (["--target", "store", "--rate", "1", "--concurrency", "1"], "choose one"),
        (["--target", "store", "--workload", "trace"], "belong together"),
        (
            ["--target", "store", "--workload", "trace", "--trace", "missing.jsonl"],
            "name a trace that is a readable file",
        ),
        (["--target", "store", "--report", "x.pdf"], "ends with .html or .json"),
        (["--target", "store", "--timeout", "soon"], "--timeout"),
    ],
)
def test_a_wrong_argument_is_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    monkeypatch.setattr(StoreTarget, "open", lambda *_: pytest.fail("it was found after the run had begun"))
    assert run_command(App(), ["bench", "serve", *arguments]) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1

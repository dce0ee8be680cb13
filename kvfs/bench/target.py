"""Where requests go: a server with the API of OpenAI, or a store in this process."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvfs.errors import ConfigError
from kvfs.namespace import Namespace
from kvfs.pages.layout import PageLayout
from kvfs.store import Store, open_store

if TYPE_CHECKING:
    from aiohttp import ClientSession

CONNECT_SECONDS = 10.0
LINE_BYTES_MAX = 1 << 20  # of an event of the answer
MESSAGE_MAX = 200  # characters of an error that are kept
_JSON = {"Content-Type": "application/json"}


class Answer(NamedTuple):
    """What one request brought. Times are in seconds of ``time.perf_counter``."""

    sent: float
    token_times: list[float]  # of each event that brought text, the first one included
    ended: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # of the prompt, as the server says; None: it does not
    generated: list[int]  # token ids, where the server sends them
    error: str = ""  # why it failed; then the other fields say how far it came


class Target(Protocol):
    """Sends requests. ``send`` does not raise for a server that fails: it says so in its answer."""

    async def send(self, prompt: Sequence[int], output_tokens: int) -> Answer: ...

    async def close(self) -> None: ...


class OpenAITarget:
    """``/completions`` of a server, streamed, with prompts of token ids. Owns a pool of connections."""

    def __init__(self, session: ClientSession, url: str, model: str, seconds: float) -> None:
        self._session, self._url, self._model, self._seconds = session, url, model, seconds

    @classmethod
    async def connect(cls, url: str, model: str | None, seconds: float) -> OpenAITarget:
        """``url``: up to and including ``/v1``. ``seconds``: of a whole request. ConfigError if nothing answers."""
        try:
            import aiohttp
        except ModuleNotFoundError:
            raise ConfigError("kvfs bench serve needs aiohttp: pip install 'kvfs[bench]'") from None

        url = url.rstrip("/")
        timeout = aiohttp.ClientTimeout(total=seconds, connect=CONNECT_SECONDS)
        session = aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0), read_bufsize=LINE_BYTES_MAX
        )
        try:
            async with session.get(f"{url}/models", timeout=aiohttp.ClientTimeout(total=CONNECT_SECONDS)) as answer:
                listed = [m["id"] for m in (await answer.json(content_type=None))["data"]]
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError, KeyError, TypeError) as exc:
            await session.close()
            reason = _reason(exc)
            raise ConfigError(f"{url}/models does not answer ({reason}): is --target right, up to /v1?") from None
        if model is None and len(listed) == 1:
            model = listed[0]
        if model not in listed:
            await session.close()
            raise ConfigError(f"{url} serves {', '.join(map(str, listed[:8]))}: name one of them with --model")
        assert model is not None
        return cls(session, f"{url}/completions", model, seconds)

    async def send(self, prompt: Sequence[int], output_tokens: int) -> Answer:
        import aiohttp

        request = {
            "model": self._model, "prompt": list(prompt), "max_tokens": output_tokens, "stream": True,
            "stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        times, ids, usage, error = list[float](), list[int](), dict[str, Any](), ""
        body = json.dumps(request).encode()
        sent = time.perf_counter()
        try:
            async with self._session.post(self._url, data=body, headers=_JSON) as response:
                if response.status != 200:
                    error = f"HTTP {response.status}: {(await response.text())[:MESSAGE_MAX]}"
                else:
                    async for event in _events(response.content):
                        if event.get("error"):
                            error = str(event["error"])[:MESSAGE_MAX]
                        for choice in event.get("choices") or ():
                            if choice.get("text") or choice.get("token_ids"):
                                times.append(time.perf_counter())
                                ids += choice.get("token_ids") or ()
                        usage = event.get("usage") or usage
        except asyncio.TimeoutError:
            error = f"no end within {self._seconds:.0f} s"
        except (aiohttp.ClientError, OSError, ValueError, AttributeError, TypeError) as exc:
            error = f"{type(exc).__name__}: {exc}"[:MESSAGE_MAX]
        if not error and not times:
            error = "no text came"
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return Answer(
            sent, times, time.perf_counter(), usage.get("prompt_tokens", len(prompt)),
            usage.get("completion_tokens", len(times)), cached, ids, error,
        )  # fmt: skip

    async def close(self) -> None:
        await self._session.close()


def _reason(exc: Exception) -> str:
    """Why nothing answers, in the words of the system where it has some."""
    if isinstance(exc, asyncio.TimeoutError):
        return f"no answer within {CONNECT_SECONDS:.0f} s"
    cause = getattr(exc, "os_error", exc)  # of an error of aiohttp, whose text has more than the reason
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    return str(getattr(cause, "strerror", None) or exc) or type(exc).__name__


async def _events(lines: AsyncIterable[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of server-sent events. ValueError for one that is none."""
    async for line in lines:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError("an event that is no object")
            yield event


class StoreTarget:
    """A store in this process: a lookup, the load of what it found, and the save of the rest.

    No token is computed: the first token comes with the load.
    """

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store, self._namespace = store, namespace
        (group,) = namespace.layout.groups
        self._page_bytes = group.part_bytes(group.full)

    @classmethod
    def open(cls, path: str, layout: PageLayout) -> StoreTarget:
        """A new store in ``path``, which may fill half of what is free there."""
        free = shutil.disk_usage(os.path.dirname(path)).free
        store = open_store(path, capacity=max(1 << 30, free // 2), counted=False)
        return cls(store, store.namespace("bench", layout, "bench"))

    async def send(self, prompt: Sequence[int], output_tokens: int) -> Answer:
        return await asyncio.to_thread(self._send, prompt)

    def _send(self, prompt: Sequence[int]) -> Answer:
        ns, sent = self._namespace, time.perf_counter()
        with ns.match(prompt) as match:
            size = ns.layout.page_tokens
            chunks = (
                ns.get(match, memoryview(bytearray(match.tokens // size * self._page_bytes))) if match.tokens else 0
            )
        loaded = time.perf_counter()
        missing = len(prompt) // size - chunks
        done = ns.put(prompt, bytes(missing * self._page_bytes), start=chunks) if missing else None
        error = f"{done.declined} pages were declined ({done.reason})" if done is not None and done.declined else ""
        return Answer(sent, [loaded], time.perf_counter(), len(prompt), 0, chunks * size, [], error)

    async def close(self) -> None:
        await asyncio.to_thread(self._store.close)

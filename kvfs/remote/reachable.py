"""Whether a bucket could be used now, told within seconds: for ``kvfs config set`` and ``kvfs doctor``.

Nothing is stored. The question goes out in a daemon thread: a directory of a dead file server, or a search for
credentials that retries, ends at no timeout of a request.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from kvfs.directory.config import Remote
from kvfs.errors import KvfsError
from kvfs.remote.urls import open_bucket

SECONDS = 3.0  # until a bucket counts as away
REQUEST_SECONDS = 2.0  # of one request, which is not retried: its own error says more than the end of SECONDS


def problem(remote: Remote, *, seconds: float = SECONDS) -> str:
    """Why the bucket of the settings cannot be used, in one line; "" if it can, or if it is empty. Never raises."""
    answer: Future[str] = Future()
    try:
        threading.Thread(target=lambda: answer.set_result(_ask(remote)), name="kvfs-bucket", daemon=True).start()
        return answer.result(seconds)
    except FutureTimeoutError:
        return f"{remote.url} does not answer within {seconds:g} s"
    except RuntimeError as exc:  # the process may have no more threads
        return f"{remote.url} cannot be asked: {exc}"


def _ask(remote: Remote) -> str:
    try:
        bucket = open_bucket(remote, timeout=min(REQUEST_SECONDS, remote.timeout_seconds), retries=0)
        try:
            if not bucket.is_ready():
                bucket.refuse_foreign()
        finally:
            bucket.objects.close()
    except KvfsError as exc:
        return " ".join(str(exc).split())
    except Exception as exc:  # of the client of the object store: what it says is the answer
        return f"{remote.url}: {type(exc).__name__}: {' '.join(str(exc).split())}"
    return ""

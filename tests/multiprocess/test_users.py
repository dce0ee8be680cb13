"""One store for several users of one group, as containers with random users need it, and for no other user."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.torture.case import open_store
from tools.torture.crew import ROOT

pytestmark = pytest.mark.needs_root("processes change their user")

GROUP = 54321
AS_USER = """
import json, os, sys
path, uid, gid, mine, others = sys.argv[1], *map(int, sys.argv[2:5]), json.loads(sys.argv[5])
from kvfs.errors import KvfsError
from tools.torture.case import PROMPTS, get, namespace, open_store, put
from tools.torture.judge import Judge
import tempfile
with tempfile.TemporaryDirectory() as folder, open_store(folder + "/warm") as store:
    # other users may not be able to read the interpreter's files: everything is imported before
    put(namespace(store), PROMPTS.tokens(1, 6), Judge())
    get(namespace(store), PROMPTS.tokens(1, 6), Judge())
os.setgroups([])
os.setgid(gid)
os.setuid(uid)
os.umask(0o077)
judge = Judge()
try:
    with open_store(path) as store:
        ready = store.wait_ready(10.0)
        ns = namespace(store)
        served = [get(ns, PROMPTS.tokens(f, 6), judge) for f in others]
        result = put(ns, PROMPTS.tokens(mine, 6), judge)
        print(json.dumps({"served": served, "stored": result.stored, "own": get(ns, PROMPTS.tokens(mine, 6), judge),
                          "ready": ready, "notes": judge.notes}))
except KvfsError as exc:
    print(json.dumps({"refused": type(exc).__name__, "text": str(exc)}))
"""


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that the group may use, below directories that every user may traverse."""
    with tempfile.TemporaryDirectory(prefix="kvfs-users-") as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "store"
        path.mkdir()
        os.chown(path, 0, GROUP)
        os.chmod(path, 0o2770)
        yield path


def as_user(path: Path, uid: int, gid: int, mine: int, others: list[int]) -> dict[str, object]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/"}
    command = [sys.executable, "-c", AS_USER, str(path), str(uid), str(gid), str(mine), json.dumps(others)]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_users_of_one_group_share_all_pages(shared: Path) -> None:
    seen: list[int] = []
    for number, uid in enumerate((50001, 50002, 0, 50003)):
        found = as_user(shared, uid, GROUP, number, seen)
        assert found.get("notes") == [], found
        assert found["served"] == [6] * len(seen), (uid, found)
        assert (found["stored"], found["own"], found["ready"]) == (6, 6, True), (uid, found)
        seen.append(number)
    for folder, _, names in os.walk(shared):
        assert os.stat(folder).st_gid == GROUP, folder
        for name in names:
            st = os.stat(os.path.join(folder, name))
            assert (st.st_gid, stat.S_IMODE(st.st_mode)) == (GROUP, 0o660), os.path.join(folder, name)


def test_a_dirty_index_of_another_user_is_rebuilt(shared: Path) -> None:
    as_user(shared, 50001, GROUP, 1, [])
    killed = AS_USER.replace("ready = store", "os.kill(os.getpid(), 9) if mine == 2 else 0; ready = store")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/"}
    command = [sys.executable, "-c", killed, str(shared), "50002", str(GROUP), "2", "[]"]
    assert subprocess.run(command, env=environment, cwd="/", timeout=60, check=False).returncode == -9
    found = as_user(shared, 50003, GROUP, 3, [1])
    assert found["served"] == [6], found


def test_other_users_get_an_error_that_says_why(shared: Path) -> None:
    as_user(shared, 50001, GROUP, 1, [])
    found = as_user(shared, 50009, 50009, 2, [])
    assert found.get("refused") == "StoreAccessError", found
    assert "permission" in str(found["text"]).lower() and str(shared) in str(found["text"])


def test_a_private_store_is_the_owners(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvfs-users-") as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "store"
        open_store(path).close()
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert as_user(path, 50001, GROUP, 1, []).get("refused") == "StoreAccessError"

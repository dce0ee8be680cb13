"""Every command of docs/cli.md on a terminal, with ordinary names and with hostile ones, in the store and outside."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvfs
from kvfs.cli.main import COMMANDS
from tests.cli.commands import environment, shown
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of

CONTROL = "\x1b]0;pwned\x07\x1b[2J\u202e"
SHELL = "a;touch${IFS}pwned;$(touch pwned)`touch pwned`"
NAMES = {
    "ordinary": ["alpha", "meta-llama/Llama-3.1-405B-Instruct-FP8", "qwen"],
    "hostile": ["SYSTEM", "AAA" + 60 * " " + "x", SHELL],
}
#: Runs each command of argv[1] (JSON) in one process, whose three streams are the terminal.
DRIVER = """
import json, sys
from kvfs.cli.app import App
from kvfs.cli.main import run
for arguments in json.loads(open(sys.argv[1]).read()):
    print("\\n@@", arguments[0], run(App(), arguments), flush=True)
"""
#: What a command may write to a terminal: colours, progress bars, and the screen of `top`. No name contains these.
COLOURS = re.compile(r"\x1b\[(?:[0-9;]*m|\?(?:25|1049)[hl]|[0-9]*[AGK]|[HJ])")


def commands_of(names: list[str], prompt: str, bundle: str, folder: Path) -> list[list[str]]:
    first, second, third = names
    return [
        ["init", "--capacity", "1GiB"],  # refused: it is there
        ["config"], ["config", "set", "capacity", "128MiB"],
        ["inspect"], ["inspect", first], ["inspect", third],
        ["ls"], ["ls", second], ["ls", third, "--no-truncate"], ["ls", "nothing" + third],
        ["match", "-n", first, prompt], ["match", "-n", third, prompt], ["match", "-n", CONTROL, prompt],
        ["stats"], ["top", "--times", "1", "--interval", "1s"], ["log"], ["metrics"],
        ["gc"], ["gc", "--target", "0"], ["gc", "--recompress"],
        ["verify"], ["verify", "--all"], ["doctor"],
        ["pin", first, prompt, "-n", first], ["pin", third, prompt, "-n", third], ["pin", "ls"], ["unpin", third],
        ["unpin", CONTROL],
        ["warm", second], ["warm", "--pinned"],
        ["export", bundle, third], ["import", bundle], ["import", prompt],
        ["push", first], ["pull", "-n", first, prompt], ["remote", "ls"],  # there is no bucket
        ["bench", "--help"], ["mount", "--help"], ["umount", str(folder / CONTROL)],  # benches and mounts have tests
        ["completion", "bash"],
        ["rm", first, "--dry-run"], ["rm", third], ["rm", second, "--yes"], ["rm", third, "--yes"], ["ls"],
    ]  # fmt: skip


@pytest.mark.parametrize("kind", NAMES)
def test_every_command_on_a_terminal(store_path: Path, tmp_path: Path, kind: str) -> None:
    names, tokens = NAMES[kind], tokens_of(1, 4)
    ids = tmp_path / (f"{CONTROL}{SHELL.replace('/', '')}.ids" if kind == "hostile" else "prompt.ids")
    ids.write_text(" ".join(map(str, tokens)))
    with kvfs.open(store_path, capacity="64MiB") as store:
        for name in names:
            store.namespace(name, tiny(), "1").put(tokens, seeded(1, 4 * TINY_BYTES))
    if kind == "hostile":
        for folder in ("segments", "import", "pins", "quarantine"):
            (store_path / folder / f"{CONTROL}x").write_bytes(b"")
    commands = commands_of(names, str(ids), str(tmp_path / "out.tar"), tmp_path)
    assert {c[0] for c in commands} == set(COMMANDS), "every command is tried"
    wanted = tmp_path / "commands.json"
    wanted.write_text(json.dumps(commands))
    main, side = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(wanted)], env=environment(KVFS_DIR=str(store_path), TERM="xterm"),
        cwd=tmp_path, stdin=side, stdout=side, stderr=side, start_new_session=True,
    )  # fmt: skip
    os.close(side)
    os.write(main, b"n\n")  # to the question of rm
    seen = shown(main)
    assert child.wait(30) == 0, seen.decode()
    text = seen.decode()
    assert len(re.findall("^@@ ", text, re.MULTILINE)) == len(commands), text
    plain = COLOURS.sub("", text)
    assert not set("\x1b\x07\u202e") & set(plain), [line for line in plain.splitlines() if "\x1b" in line]
    assert not list(tmp_path.rglob("pwned")) and "Traceback" not in plain
    codes = dict(re.findall(r"^@@ (\w+) (\d+)\r?$", plain, re.MULTILINE))
    assert codes["ls"] == codes["pin"] == codes["stats"] == codes["gc"] == codes["completion"] == "0", codes

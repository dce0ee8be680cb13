"""Compiles native/*.c into kvfs/native, for a checkout: ``python -m tools.build_native``.

CC: the compiler's command. CFLAGS: more of its options.

``--check`` builds the C tests instead, with the address and undefined-behaviour sanitizers, and runs them;
``--check EXECUTIONS SEED``: with so many executions of the fuzzer, from that seed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = Path("kvfs") / "native" / "_kvfs_native.so"
FLAGS = ["-std=gnu11", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
FUZZ_EXECUTIONS = 20_000  # of --check: a second
SANITIZE = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


class NoCompilerError(Exception):
    """There is no C compiler, or it failed; the message says which."""


def compiler() -> list[str]:
    """The command of the C compiler."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise NoCompilerError("no C compiler (cc, gcc, clang) on PATH")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as exc:
        raise NoCompilerError(f"{command[0]}: {exc.strerror}") from None
    if done.returncode:
        raise NoCompilerError(f"{' '.join(command)}\n{done.stderr.strip()}")


def build(root: Path = ROOT) -> Path:
    """Compile the library below ``root``. A process that has the old one loaded keeps it."""
    sources = sorted(str(path) for path in (root / "native").glob("*.c"))
    output = root / OUTPUT
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".build-") as folder:
        made = os.path.join(folder, OUTPUT.name)
        extra = shlex.split(os.environ.get("CFLAGS", ""))
        _run([*compiler(), *FLAGS, *extra, "-shared", *sources, "-o", made])
        os.replace(made, output)
    return output


def check(root: Path = ROOT, executions: int = FUZZ_EXECUTIONS, seed: int = 1) -> None:
    """Build the C tests with the sanitizers, and run them. CHECK_RUN: what runs the programs, for an emulator."""
    sources = sorted(str(path) for path in (root / "native").glob("*.c"))
    runner = shlex.split(os.environ.get("CHECK_RUN", ""))
    options = [] if os.environ.get("CHECK_PLAIN") else SANITIZE
    options = [*FLAGS, *options, "-Werror", "-DKVFS_READ_HOOK", "-DKVFS_SLOTS=2", f"-I{root / 'native'}"]
    with tempfile.TemporaryDirectory(prefix="kvfs-native-") as folder:
        for name, arguments in (("check", [folder]), ("fuzz", [str(seed), str(executions)])):
            program = os.path.join(folder, f"{name}-program")
            _run([*compiler(), *options, str(root / "native" / "tests" / f"{name}.c"), *sources, "-o", program])
            done = subprocess.run([*runner, program, *arguments], stdin=subprocess.DEVNULL)
            if done.returncode:
                raise NoCompilerError(f"{name}.c ended with status {done.returncode}")


def main(arguments: list[str]) -> int:
    try:
        if arguments[:1] == ["--check"] and len(arguments) in (1, 3):
            check(ROOT, *map(int, arguments[1:]))
        elif not arguments:
            print(build())
        else:
            print(__doc__)
            return 2
    except NoCompilerError as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A newer vLLM on a machine without a GPU: its Python code over the kernels of an older CPU build.

``python -m tools.vllm_overlay .venv-vllm .venv-vllm-next [VERSION]`` makes an environment that adds one package to
another environment: ``vllm`` from the wheel of VERSION (default: the newest) with the compiled libraries of the CPU
build and the modules that declare them. vLLM's CPU wheels follow weeks after a release; scheduler, connector interface
and cache layouts are Python, so this tells early what a release changes for ``kvfs.integrations.vllm``. What the new
code expects of newer kernels is missing: it is no engine to serve with.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

#: modules that call compiled code by name: they stay those of the CPU build
KERNEL_MODULES = ("_custom_ops.py",)


def site_packages(environment: Path) -> Path:
    found = sorted((environment / "lib").glob("python3.*/site-packages"))
    if not found:
        raise SystemExit(f"{environment} is no environment: run make test-vllm first")
    return found[0]


def overlay(base: Path, target: Path, version: str) -> str:
    """Make ``target``. Returns the version of vLLM in it."""
    python, old = base / "bin" / "python", site_packages(base)
    subprocess.run([python, "-m", "venv", "--without-pip", "--clear", target], check=True)
    new = site_packages(target)
    # as a directory of packages, so that what ``base`` has installed in place is found too
    (new / "base.pth").write_text(f"import site; site.addsitedir({str(old.resolve())!r})\n")
    with tempfile.TemporaryDirectory(dir=target) as folder:
        wanted = f"vllm=={version}" if version else "vllm"
        pip = [python, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-input", "--no-deps"]
        subprocess.run([*pip, "--only-binary", ":all:", "-d", folder, wanted], check=True)
        (wheel,) = Path(folder).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.startswith("vllm/") and not n.endswith((".so", ".a"))]
            archive.extractall(new, names)
        found = wheel.name.split("-")[1]
    about = new / f"vllm-{found}+cpu.dist-info"  # vLLM chooses its platform by this version
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}+cpu\n")
    for library in (old / "vllm").rglob("*.so"):
        place = new / "vllm" / library.relative_to(old / "vllm")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, place)
    for module in KERNEL_MODULES:
        shutil.copy2(old / "vllm" / module, new / "vllm" / module)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", type=Path, help="environment with vLLM's CPU build")
    parser.add_argument("target", type=Path, help="environment to make; replaced if it exists")
    parser.add_argument("version", nargs="?", default="", help="of vLLM (default: the newest)")
    given = parser.parse_args()
    sys.stdout.write(f"vLLM {overlay(given.base, given.target, given.version)} in {given.target}\n")


if __name__ == "__main__":
    main()

"""A real object store for tests and benchmarks: one monitor, one OSD in memory and one S3 gateway of Ceph.

    python -m tools.ceph install .ceph    # Debian's packages and what they need, unpacked below .ceph; needs apt
    python -m tools.ceph run .ceph        # a cluster until ctrl-C; prints the environment that kvfs needs for it

Nothing is installed into the system, and no service of it is started. Everything listens on the loopback device of its
network namespace; the gateway on ``host`` as well. What is stored is lost at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[1] / "tests" / "remote" / "debian.txt"
START_SECONDS = 300.0  # for the whole cluster to answer; about 15 on an idle machine
STOP_SECONDS = 20.0
MEMORY_BYTES = 8 << 30  # that the OSD says it has; it takes what is stored
LOCAL = "127.0.0.1"

_CONF = """
[global]
fsid = {fsid}
mon_host = v2:{local}:{mon_port}
mon_initial_members = a
public_addr = {local}
keyring = {folder}/keyring
run_dir = {folder}
admin_socket = {folder}/$name.asok
log_file = {folder}/$name.log
mon_cluster_log_file = {folder}/cluster.log
mon_data = {folder}/mon
mon_data_avail_crit = 1
osd_data = {folder}/osd
rgw_data = {folder}
auth_allow_insecure_global_id_reclaim = false
mon_allow_pool_size_one = true
osd_pool_default_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_objectstore = memstore
memstore_device_bytes = {memory}
plugin_dir = {lib}/ceph
erasure_code_dir = {lib}/ceph/erasure-code
osd_class_dir = {lib}/rados-classes
rgw_s3_auth_use_sts = true
rgw_sts_key = {sts_key}
rgw_sts_min_session_duration = 1
"""


class CephError(Exception):
    """The cluster did not start, or does not do what it was told; the message has its last words."""


class Ceph:
    """A cluster. Owns its processes and a folder of temporary files; ``close`` ends both.

    ``root`` is what ``install`` has made. ``inside`` is put before each command: ``ip netns exec NAME``. ``host``: an
    address at which the gateway is asked.
    """

    ACCESS_KEY, SECRET_KEY = "kvfs-access", "kvfs-secret"

    def __init__(self, root: Path, *, inside: Sequence[str] = (), host: str = LOCAL) -> None:
        self._lib = root.resolve() / "usr" / "lib" / "x86_64-linux-gnu"
        if not self._lib.is_dir():
            raise CephError(f"{root} holds no Ceph for x86_64: run python -m tools.ceph install {root}")
        self._bin = root.resolve() / "usr" / "bin"
        self._python = root.resolve() / "usr" / "lib" / "python3" / "dist-packages"
        self._inside = list(inside)
        self._folder = Path(tempfile.mkdtemp(prefix="kvfs-ceph-"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.faketime = self._lib / "faketime" / "libfaketime.so.1"
        self.port = _free_port()
        self.endpoint = f"http://{host}:{self.port}"
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def environment(self) -> dict[str, str]:
        """What kvfs needs to find the gateway."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": self.ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": self.SECRET_KEY,
        }  # fmt: skip

    def start_gateway(self) -> None:
        """Start the gateway, if it does not run, and wait until it answers. CephError."""
        # by default each small answer on a used connection waits 40 ms for the acknowledgement of its head
        frontend = f"--rgw_frontends=beast endpoint=0.0.0.0:{self.port} tcp_nodelay=1"
        self._spawn("radosgw", "-f", "-n", "client.admin", frontend)
        end = time.monotonic() + START_SECONDS
        while not self._asked("GET", self.endpoint):
            self._check("radosgw", end)
            time.sleep(0.1)

    def kill_gateway(self) -> None:
        """As if its host were gone: what it was doing is left as it is."""
        process = self._processes.pop("radosgw")
        process.kill()
        process.wait(STOP_SECONDS)

    def add_key(self, access_key: str, secret_key: str) -> None:
        """Further credentials of the same user."""
        self._admin(
            "key", "create", "--uid=kvfs", "--key-type=s3", f"--access-key={access_key}", f"--secret={secret_key}"
        )

    def remove_key(self, access_key: str) -> None:
        """The gateway refuses these credentials from now on."""
        self._admin("key", "rm", "--uid=kvfs", "--key-type=s3", f"--access-key={access_key}")

    def add_role(self, name: str) -> str:
        """A role that may read and write all buckets, and that the user may assume for a second or longer; its ARN."""
        trust = _policy({"Principal": {"AWS": ["arn:aws:iam:::user/kvfs"]}, "Action": ["sts:AssumeRole"]})
        rights = _policy({"Action": ["s3:*"], "Resource": "arn:aws:s3:::*"})
        self._admin("role", "create", f"--role-name={name}", f"--assume-role-policy-doc={trust}")
        self._admin("role-policy", "put", f"--role-name={name}", "--policy-name=all", f"--policy-doc={rights}")
        return f"arn:aws:iam:::role/{name}"

    def make_bucket(self, name: str) -> None:
        import obstore
        from obstore.store import S3Store

        store = S3Store(
            name, endpoint=self.endpoint, access_key_id=self.ACCESS_KEY, secret_access_key=self.SECRET_KEY,
            region="us-east-1", client_options={"allow_http": True},
        )  # fmt: skip
        if not self._asked("PUT", obstore.sign(store, "PUT", "", timedelta(seconds=100))):
            raise CephError(f"the gateway did not make the bucket {name!r}: {self._said('radosgw')}")

    def close(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGKILL)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        self._processes.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        folder, port = self._folder, _free_port()
        conf = _CONF.format(
            fsid=uuid.uuid4(), local=LOCAL, mon_port=port, folder=folder, lib=self._lib, memory=MEMORY_BYTES,
            sts_key=os.urandom(8).hex(),
        )  # fmt: skip
        (folder / "ceph.conf").write_text(conf)
        for name in ("mon", "osd"):
            (folder / name).mkdir()
        ring, every = str(folder / "keyring"), ["--cap", "mon", "allow *", "--cap", "osd", "allow *"]
        self._do("ceph-authtool", "--create-keyring", ring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        for name in ("client.admin", "osd.0"):
            self._do("ceph-authtool", ring, "--gen-key", "-n", name, *every)
        monmap = str(folder / "monmap")
        self._do("monmaptool", "--create", "--addv", "a", f"[v2:{LOCAL}:{port}]", monmap)
        self._do("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", ring)
        self._spawn("ceph-mon", "-f", "-i", "a")
        osd = str(uuid.uuid4())
        self._do("ceph", "osd", "new", osd)
        self._do("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._spawn("ceph-osd", "-f", "-i", "0")
        self._admin(
            "user", "create", "--uid=kvfs", "--display-name=kvfs", f"--access-key={self.ACCESS_KEY}",
            f"--secret={self.SECRET_KEY}",
        )  # fmt: skip
        self.start_gateway()

    def _admin(self, *arguments: str) -> None:
        self._do("radosgw-admin", *arguments)

    def _command(self, program: str, arguments: Sequence[str]) -> list[str]:
        python = ["/usr/bin/python3"] if program == "ceph" else []  # the one that Debian's modules are for
        return [*self._inside, *python, str(self._bin / program), *arguments]

    def _environment(self) -> dict[str, str]:
        return os.environ | {
            "LD_LIBRARY_PATH": f"{self._lib}:{self._lib}/ceph:{self._lib.parents[2]}/lib/x86_64-linux-gnu",
            "PYTHONPATH": str(self._python), "CEPH_CONF": str(self._folder / "ceph.conf"),
        }  # fmt: skip

    def _do(self, program: str, *arguments: str) -> None:
        """Run a command of Ceph to its end. CephError."""
        try:
            subprocess.run(
                self._command(program, arguments), env=self._environment(), check=True, timeout=START_SECONDS,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        except subprocess.CalledProcessError as exc:
            raise CephError(f"{program} failed: {exc.stderr[-2000:]}") from None
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise CephError(f"{program} failed: {exc}; {self._said('ceph-mon')}") from None

    def _spawn(self, program: str, *arguments: str) -> None:
        if program not in self._processes:
            with (self._folder / f"{program}.out").open("ab") as out:
                self._processes[program] = subprocess.Popen(
                    self._command(program, arguments), env=self._environment(), stdin=subprocess.DEVNULL, stdout=out,
                    stderr=out,
                )  # fmt: skip

    def _check(self, program: str, end: float) -> None:
        if self._processes[program].poll() is not None or time.monotonic() > end:
            raise CephError(f"{program} does not answer: {self._said(program)}")

    def _said(self, program: str) -> str:
        file = self._folder / f"{program}.out"
        return file.read_bytes()[-2000:].decode(errors="replace") if file.exists() else ""

    def _asked(self, method: str, url: str) -> bool:
        """Whether a request, from where the gateway is, was answered with success."""
        done = subprocess.run(
            [*self._inside, sys.executable, "-c", _REQUEST, method, url], stdin=subprocess.DEVNULL, check=False,
            stderr=subprocess.DEVNULL, timeout=START_SECONDS,
        )  # fmt: skip
        return done.returncode == 0


_REQUEST = "import sys, urllib.request as u; u.urlopen(u.Request(sys.argv[2], method=sys.argv[1]), timeout=60)"


def _policy(allowed: dict[str, object]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": "Allow", **allowed}]})


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((LOCAL, 0))
        return int(one.getsockname()[1])


def install(root: Path) -> None:
    """Download what PACKAGES names, with what that needs and the system lacks, and unpack it below ``root``."""
    shutil.rmtree(root, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="kvfs-debs-") as folder:
        (Path(folder) / "partial").mkdir()
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(
            ["apt-get", "install", "-qq", "-y", "--download-only", "--no-install-recommends",
             "-o", f"Dir::Cache::archives={folder}", *PACKAGES.read_text().split()], check=True,
        )  # fmt: skip
        root.mkdir(parents=True)
        for package in sorted(Path(folder).glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", package, root], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("install", "run"))
    parser.add_argument("root", type=Path)
    chosen = parser.parse_args()
    if chosen.what == "install":
        install(chosen.root)
        return
    for ends in (signal.SIGINT, signal.SIGTERM):  # a shell starts background commands with SIGINT ignored
        signal.signal(ends, signal.default_int_handler)
    with contextlib.closing(Ceph(chosen.root)) as ceph:
        ceph.make_bucket("kvfs")
        for name, value in ceph.environment().items():
            print(f"export {name}={value}")
        print("kvfs config set remote.url s3://kvfs/test", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()

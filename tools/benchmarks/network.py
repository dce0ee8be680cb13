"""Hosts of one machine: network namespaces behind links with a rate and a delay. Needs root and iproute2.

The delay is that of the kernel's netem. Where the kernel lacks it, a relay next to the gateway holds the bytes of
each connection back for as long; it takes CPU time of the machine, so it is for slow links. ``tbf`` limits the rate.
"""

from __future__ import annotations

import ctypes
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tools.benchmarks.measure import BenchError

GATEWAY = "kvfs-gateway"
RELAYED_BYTES = 256 << 10  # of one read of the relay
RELAYED_MAX = 256  # reads that a direction of a connection holds back at most: 64 MiB
_CLONE_NEWNET = 0x40000000


class Network:
    """A gateway and ``hosts``, each with a link to it. Owns the namespaces; ``close`` removes them."""

    def __init__(self, hosts: Sequence[str], rate: str, delay_seconds: float) -> None:
        """``rate``: of each link and direction, as of tc, such as ``1gbit``. ``delay_seconds``: of a round trip."""
        self.hosts = [f"kvfs-{name}" for name in hosts]
        self._made: list[str] = []
        try:
            for name in (GATEWAY, *self.hosts):
                _run("ip", "netns", "add", name)
                self._made.append(name)
                _in(name, "ip", "link", "set", "lo", "up")
            for i, name in enumerate(self.hosts):
                peer = ("peer", "name", f"to-{i}", "netns", GATEWAY)
                _run("ip", "link", "add", "uplink", "netns", name, "type", "veth", *peer)
                for where, link, end in ((name, "uplink", 2), (GATEWAY, f"to-{i}", 1)):
                    _in(where, "ip", "addr", "add", f"10.77.{i}.{end}/24", "dev", link)
                    _in(where, "ip", "link", "set", link, "up")
            self.has_netem = self._delayed(rate, delay_seconds)
        except BaseException:
            self.close()
            raise

    def _delayed(self, rate: str, seconds: float) -> bool:
        """Limit the links; whether the kernel delays what they carry."""
        netem = False
        for where, link in [(n, "uplink") for n in self.hosts] + [(GATEWAY, f"to-{i}") for i in range(len(self.hosts))]:
            rule = ("rate", rate, "burst", "4mb", "latency", "50ms")
            _in(where, "tc", "qdisc", "add", "dev", link, "root", "handle", "1:", "tbf", *rule)
            if seconds:
                delay = ("netem", "delay", f"{seconds / 2 * 1e3:g}ms", "limit", "100000")
                done = _tried(where, "tc", "qdisc", "add", "dev", link, "parent", "1:", *delay)
                if not done and netem:
                    raise BenchError("netem works on some links only")
                netem = done
        return netem

    def address(self, host: int) -> str:
        """Where a host finds the gateway."""
        return f"10.77.{host}.1"

    def close(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=False)
        self._made.clear()


def enter(namespace: str) -> None:
    """The calling thread, and those that it starts from now on, are in this namespace."""
    fd = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
            raise BenchError(f"{namespace}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)


class Relay:
    """Holds back what passes between its own port and another one of the namespace, each way for ``seconds``."""

    def __init__(self, target: int, seconds: float) -> None:
        self._target, self._seconds = target, seconds
        self._listener = socket.create_server(("0.0.0.0", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._target))
            for source, target in ((near, far), (far, near)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                held: queue.Queue[tuple[float, bytes]] = queue.Queue(RELAYED_MAX)
                threading.Thread(target=self._take, args=(source, held), daemon=True).start()
                threading.Thread(target=self._give, args=(target, held), daemon=True).start()

    def _take(self, source: socket.socket, held: queue.Queue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(RELAYED_BYTES)
            except OSError:
                data = b""
            held.put((time.monotonic() + self._seconds, data))

    def _give(self, target: socket.socket, held: queue.Queue[tuple[float, bytes]]) -> None:
        sends = True
        while True:
            at, data = held.get()
            time.sleep(max(0.0, at - time.monotonic()))
            try:
                if sends and data:
                    target.sendall(data)
                elif sends:
                    target.shutdown(socket.SHUT_WR)
            except OSError:
                sends = False
            if not data:
                return


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"{' '.join(command)}: {done.stderr.strip()} (it needs root)")


def _in(namespace: str, *command: str) -> None:
    _run("ip", "netns", "exec", namespace, *command)


def _tried(namespace: str, *command: str) -> bool:
    return not subprocess.run(["ip", "netns", "exec", namespace, *command], check=False, capture_output=True).returncode

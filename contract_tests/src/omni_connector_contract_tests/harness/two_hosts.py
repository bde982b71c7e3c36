"""Two hosts on one machine: network namespaces joined by a cable that a test can cut, slow down or spoil.

The test itself stays outside and talks to its peers over inherited pipes, so a cut never touches the control::

    with TwoHosts() as hosts:
        peers = Peers(processes=True, patience_s=60, prefixes={"producer": hosts.prefix("a"), "consumer": hosts.prefix("b")})
        ...
        with hosts.cut():
            ...

Everything (links, rules, processes, files in /dev/shm) is gone when it ends, also by SIGKILL. Needs util-linux, iproute2 and nftables,
and
root or unprivileged user namespaces.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

__all__ = ["ADDRESS", "Host", "TwoHosts", "why_not"]

Host = Literal["a", "b"]

ADDRESS: Final[dict[Host, str]] = {"a": "10.77.0.1", "b": "10.77.0.2"}
SCRIPT: Final = Path(__file__).parents[1] / "two_hosts.sh"
TOOLS: Final = ("unshare", "nsenter", "ip", "nft", "tc", "ss")
INPUT_CHAIN: Final = (
    "add table inet c; add chain inet c i {type filter hook input priority 0;}; add rule inet c i iif eth0 "
)


def why_not() -> str | None:
    """Say why two hosts cannot be made here; None when they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"two hosts need {', '.join(missing)}: apt-get install util-linux iproute2 nftables"
    tried = subprocess.run(["bash", SCRIPT, "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"two hosts cannot be made: {tried.stderr.strip()}"


CONNECT: Final = """
import socket, sys
channel, port = map(int, sys.argv[1:])
with socket.create_connection(("127.0.0.1", port)) as connection, socket.socket(fileno=channel) as channel:
    socket.send_fds(channel, [b"."], [connection.fileno()])
"""


class TwoHosts:
    """Hosts ``a`` and ``b``; see `ADDRESS`."""

    def __enter__(self) -> TwoHosts:
        self._process = subprocess.Popen(
            ["bash", SCRIPT, "sh", "-c", "echo ready; exec sleep infinity"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(why_not() or "two hosts could not be made")
        pid = self._process.pid  # of unshare, whose one child is the init of the new namespaces
        inside = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
        users = [] if os.geteuid() == 0 else ["-U", "--preserve-credentials"]
        self._enter = ["nsenter", "-t", inside, *users, "-m", "-n", "-p", f"--wdns={os.getcwd()}", "--"]
        for host in ADDRESS:
            # after a cut TCP tries again at growing intervals: up to a second instead of two minutes (Linux 6.15 and later)
            with contextlib.suppress(RuntimeError):
                self.run(host, "sysctl", "-w", "net.ipv4.tcp_rto_max_ms=1000")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def prefix(self, host: Host) -> list[str]:
        """Return what to put before a command for it to run on a host; file descriptors and environment pass through."""
        return [*self._enter, "/run/bin/on", host]

    def run(self, host: Host, *command: str) -> str:
        """Run a command on a host and return its output."""
        done = subprocess.run([*self.prefix(host), *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"on {host}: {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def connect(self, host: Host, port: int) -> socket.socket:
        """Connect to a server on a host, as its neighbour there would; usable from outside.

        Raises
        ------
        RuntimeError
            Nothing listens there.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            done = subprocess.run(
                [*self.prefix(host), sys.executable, "-S", "-c", CONNECT, str(theirs.fileno()), str(port)],
                pass_fds=[theirs.fileno()],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"on {host}: {done.stderr.strip()}")
            [descriptor] = socket.recv_fds(ours, 1, 1)[1]
        return socket.socket(fileno=descriptor)

    # ---- what can be done to the cable

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Pull the cable, and plug it in again at the end."""
        self.run("a", "ip", "link", "set", "eth0", "down")
        try:
            yield
        finally:
            self.run("a", "ip", "link", "set", "eth0", "up")

    def blackhole(self) -> contextlib.AbstractContextManager[None]:
        """Drop whatever arrives at a, until the end."""
        return self._rule("drop")

    def reset(self) -> contextlib.AbstractContextManager[None]:
        """Answer TCP segments that arrive at a with a reset, until the end."""
        return self._rule("meta l4proto tcp reject with tcp reset")

    def loss(self, percent: int) -> contextlib.AbstractContextManager[None]:
        """Lose that share of what arrives at a, at random, until the end."""
        return self._rule(f"numgen random mod 100 < {percent} drop")

    @contextlib.contextmanager
    def _rule(self, rule: str) -> Iterator[None]:
        self.run("a", "nft", INPUT_CHAIN + rule)
        try:
            yield
        finally:
            self.run("a", "nft", "delete table inet c")

    def slow(self, mbit_per_s: int) -> None:
        """Limit what leaves a, so that a test can act in the middle of a transfer."""
        rate = f"rate {mbit_per_s}mbit burst 1mb latency 100ms"
        self.run("a", "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate.split())

    def break_connections(self) -> None:
        """End every TCP connection of b with a, at once."""
        self.run("b", "ss", "-K", "dst", ADDRESS["a"])

    def received_bytes(self, host: Host) -> int:
        """Count what came over the cable to a host."""
        found = re.search(r"eth0:\s*(\d+)", self.run(host, "cat", "/proc/net/dev"))
        assert found is not None
        return int(found[1])

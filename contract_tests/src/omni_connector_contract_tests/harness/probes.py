"""Counts what a process holds, so that a test can see what was left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from omni_connector_contract_tests.harness.eventually import WITHIN_SECONDS_S, eventually
from omni_connector_contract_tests.harness.peers import PeerGoneError, Peers
from omni_connector_contract_tests.harness.worker import Run

__all__ = ["FileProbe", "Held", "LeakProbe", "check_gone", "files_of", "held"]

SOCKET = "socket:"
UNNAMED = "unnamed"
"""A thread with the name of its process, which it has by birth: all of Python's."""
POOLED = 16
"""By so many an engine's pool of connections, or of threads that it gave a name to, may grow during a class of tests: it has
one for each call in flight. An engine that is opened anew for each connector makes more."""
RECORD_NBYTES = 4096
"""A file of so many bytes holds a payload, a smaller one may be a record about one."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds.

    Attributes
    ----------
    fds
        What each open file descriptor stands for, sorted; sockets and pipes without their numbers.
    threads
        Names of the operating system's threads, sorted.
    children
        Child processes.
    """

    fds: tuple[str, ...]
    threads: tuple[str, ...]
    children: int

    def more_than(self, other: Held) -> list[str]:
        """Say what this holds more than `other`."""
        new = list((Counter(self.fds) - Counter(other.fds)).elements())
        if new.count(SOCKET) <= POOLED:
            new = [name for name in new if name != SOCKET]
        found = [f"file descriptor {name}" for name in new] if len(self.fds) > len(other.fds) else []
        started = Counter(self.threads) - Counter(other.threads)
        unnamed = started.pop(UNNAMED, 0)
        if started.total() > POOLED:
            found += [f"{count} threads {name}" for name, count in started.items()]
        if unnamed:
            found.append(f"{unnamed} threads")
        if self.children > other.children:
            found.append(f"{self.children - other.children} child processes")
        return found


def held(*, collect: bool) -> Held:
    """Look at this process, after a garbage collection if so told."""
    if collect:
        gc.collect()
    fds = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:  # the directory itself, while it was read
            continue
        fds.append(re.sub(r"\[\d+\]", "", target))
    return Held(tuple(sorted(fds)), tuple(sorted(_thread_names())), len(psutil.Process().children()))


def _thread_names() -> Iterator[str]:
    own = Path("/proc/self/comm").read_text()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended while we looked
            name = (task / "comm").read_text()
            yield UNNAMED if name == own else name.strip()


def files_of(peers: Peers) -> set[str]:
    """List the shared memory, files and abstract sockets that the session's peers have made and not removed."""
    marks = re.compile("|".join([re.escape(peers.token), *(rf"(?<!\d){pid}(?!\d)" for pid in peers.past_pids)]))
    found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if marks.search(name)}
    found |= {
        str(path) for folder in peers.folders for path in folder.rglob("*") if not (path.is_dir() or _expires(path))
    }
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        name = line.split(maxsplit=7)[7:]
        if name and name[0].startswith("@") and marks.search(name[0]):
            found.add(name[0])
    return found


def _expires(path: Path) -> bool:
    """Whether a file is a store's record that goes by itself: small, and its time of change, in the future, says when.

    What is said of a request that was failed or abandoned has to outlive everybody who said it.
    """
    try:
        seen = path.lstat()
    except FileNotFoundError:
        return True
    return seen.st_size < RECORD_NBYTES and seen.st_mtime > time.time()


class LeakProbe:
    """Compares what the session's peers hold before and after. Ask when all ends are closed.

    When a peer was started or killed in between, nothing is compared: an engine keeps a connection to each peer that it ever
    met, and who was killed had no time to tidy up.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._cast = set(peers.past_pids)
        self._files = files_of(peers)
        self._held = self._look(collect=False)

    def _look(self, *, collect: bool) -> dict[int, Held]:
        request = Run(None, held, (), {"collect": collect})
        by_pid = {peer.pid: peer for peer in self._peers.alive().values()}
        asked = {pid: peer.start(request) for pid, peer in by_pid.items()}
        found = {}
        for pid, pending in asked.items():
            with contextlib.suppress(PeerGoneError):  # it was just ending
                found[pid] = pending.result()
        return found

    def left_behind(self, *, collect: bool = True) -> list[str]:
        """Say what is there now that was not there before."""
        if self._cast != self._peers.past_pids:
            return []
        now = self._look(collect=collect)
        found = [
            f"process {pid}: {what}"
            for pid, before in self._held.items()
            if pid in now
            for what in now[pid].more_than(before)
        ]
        return found + sorted(files_of(self._peers) - self._files)

    def check(self) -> None:
        """Raise AssertionError unless soon nothing is left behind."""
        check_gone(self.left_behind)


def check_gone(look: Callable[..., list[str]]) -> None:
    """Raise AssertionError unless `look` soon finds nothing; a garbage collection, which is slow, comes second."""
    seen: list[str] = []

    def clean(collect: bool) -> bool:
        seen[:] = look(collect=collect)
        return not seen

    try:
        eventually(partial(clean, False), within_s=0.5)
    except AssertionError:
        try:
            eventually(partial(clean, True), within_s=WITHIN_SECONDS_S)
        except AssertionError:
            raise AssertionError(f"left behind: {'; '.join(seen)}") from None


class FileProbe:
    """Compares the files, shared memory and sockets of the session's peers before and after; costs next to nothing."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._files = files_of(peers)

    def check(self) -> None:
        """Raise AssertionError unless soon nothing is left behind."""
        check_gone(lambda collect: sorted(files_of(self._peers) - self._files))

"""Tell whether a process of this host is still the one that it was.

A process is looked up in ``/proc`` once, and from then on by a pidfd: 1 us, where a look-up takes 10 to 80, and a get asks every time.
"""

from __future__ import annotations

import functools
import os
import select
import time
import weakref
from pathlib import Path

import msgspec

from omni_connector_core.native import native

__all__ = ["Process", "forget", "process_of", "this_process"]


class Process(msgspec.Struct, frozen=True, array_like=True):
    """Names a process for as long as the host is up; survives JSON.

    Attributes
    ----------
    host
        Boot id and pid namespace: processes that share it see each other in ``/proc``.
    pid, started
        Process id, and start time in clock ticks since boot, as another process may get the same id later.
    """

    host: str
    pid: int
    started: int

    def dead(self) -> bool:
        """Whether it has certainly ended; False for a process of another host, of which nothing is known."""
        if self.host != _host():
            return False
        try:
            watch = _watch(self)
            if time.monotonic() > watch.until_s or _readable(watch.fd):
                watch.look()
        except ProcessLookupError:
            forget()
            return True
        except OSError:  # no descriptor is left, or a sandbox forbids this one
            return _started(self.pid) != self.started
        return False

    def here(self) -> bool:
        """Whether it is, or was, a process that this one can see."""
        return self.host == _host()


def this_process() -> Process:
    """Return the identity of the calling process."""
    return process_of(os.getpid())


def process_of(pid: int) -> Process:
    """Return the identity of a process that this one can see; of one that has ended, an identity that is dead."""
    return Process(_host(), pid, _started(pid) or 0)


LOOK_S = 1.0
"""How often a process is looked up all the same, seconds."""


class _Watch:
    """Sees a process of this host end: its `fd` is readable then. Thread-safe.

    A vendor's SDK in this process may close a descriptor that is not its own: so what this one says is confirmed by a look-up, and
    what it does not say is not believed for longer than `until_s`, on the monotonic clock.

    Raises
    ------
    ProcessLookupError
        It has ended.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self.fd = os.pidfd_open(process.pid)
        self._close = weakref.finalize(self, os.close, self.fd)
        self._close.atexit = False
        self.look()

    def look(self) -> None:
        """Look the process up."""
        if _started(self._process.pid) != self._process.started:
            raise ProcessLookupError(f"process {self._process.pid} has ended")
        self.until_s = time.monotonic() + LOOK_S


def _poll(fd: int) -> bool:
    poll = select.poll()  # one cannot be used by two threads
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


_readable = _poll if native is None else native.readable


@functools.lru_cache(maxsize=64)
def _watch(process: Process) -> _Watch:
    return _Watch(process)


def forget() -> None:
    """Let go of the processes that were asked for; for who needs them no more. Others look them up again."""
    _watch.cache_clear()


@functools.cache
def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> int | None:
    """Return a process's start time; None when it is gone or a zombie (proc_pid_stat(5), fields 3 and 22).

    Read of the first thread, as the kernel sums over all threads for the process.
    """
    try:
        file = os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        stat = os.read(file, 4096)
    except ProcessLookupError:  # it went meanwhile
        return None
    finally:
        os.close(file)
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])

"""Tell whether a process of this host is still the one that it was."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import msgspec

__all__ = ["Process", "this_process"]


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
        return self.here() and _started(self.pid) != self.started

    def here(self) -> bool:
        """Whether it is, or was, a process that this one can see."""
        return self.host == _host()


def this_process() -> Process:
    """Return the identity of the calling process."""
    pid = os.getpid()
    return Process(_host(), pid, _started(pid) or 0)


@functools.cache
def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> int | None:
    """Return a process's start time; None when it is gone or a zombie (proc_pid_stat(5), fields 3 and 22).

    Read of the first thread, as the kernel sums over all threads for the process; 10 us, and a get asks every time.
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

"""How a consumer on a producer's own host hears of a put at once, without asking the store.

A consumer that waits hangs up a *bell*: a page of shared memory, a file of `omni_connector_core.store.own_host`'s folder
``bells``. Its first counter counts everything; the others, 1,023, stand for requests. A producer that puts, fails or cleans up
counts on, in every bell of its edge, the first and that of the request, and wakes who sleeps on the latter (futex(2)). Two
producers that count at once may count as one, which is a change all the same.

A bell only says sooner what a look at the store would find: consumers look by themselves, too, because they do not hear
producers of other hosts, users and pid namespaces.

System calls: 1 a put to see whether bells were hung up or taken down, and 1 for each bell; 1 a wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import platform
import secrets
import stat
import threading
import time
import weakref
import zlib
from pathlib import Path
from typing import Any, Final

from omni_connector_core import lease
from omni_connector_core.liveness import this_process
from omni_connector_core.mapping import map_at, unmap
from omni_connector_core.native import native
from omni_connector_core.store import own_host

__all__ = ["Bells", "Listener"]

KIND = "bells"
COUNTERS = 1024
NBYTES = 4 * COUNTERS
TICK_NS = 20_000_000
"""The clock of a file system is no finer than this: a folder that changed so recently may have changed twice."""

_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_EVERYBODY = (1 << 31) - 1
_syscall = ctypes.CDLL(None).syscall
_syscall_keeping_gil = ctypes.PyDLL(None).syscall
for _function in (_syscall, _syscall_keeping_gil):
    _function.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _edge(scope: str) -> str:
    return hashlib.blake2s(scope.encode(), digest_size=8).hexdigest()


def _counter(request_id: str) -> int:
    return 1 + zlib.crc32(request_id.encode()) % (COUNTERS - 1)


def _counters(fd: int) -> Any:
    """Map a bell; it keeps no descriptor."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != NBYTES:
        raise OSError("no bell")
    address = map_at(None, NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)
    counters = (ctypes.c_uint32 * COUNTERS).from_address(address)
    lease.watch(counters, _unmap, address)
    return counters


def _unmap(address: int) -> None:
    unmap(address, NBYTES)


class _Bell:
    """Raises OSError if there is no place for it."""

    def __init__(self, scope: str) -> None:
        if _FUTEX is None:
            raise OSError(f"no futex is known on {platform.machine()}")
        folder = own_host.open_folder(KIND)
        path = folder / own_host.owned_name(this_process(), f"{_edge(scope)}-{secrets.token_hex(4)}")
        hidden = path.with_name("." + path.name)
        fd = os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, NBYTES)
            self._counters = _counters(fd)
            os.rename(hidden, path)
        except OSError:
            os.unlink(hidden)
            raise
        finally:
            os.close(fd)
        self.close = weakref.finalize(self, _take_down, path, os.getpid())

    def heard(self, request_id: str) -> int:
        return int(self._counters[_counter(request_id)])

    def rung(self) -> int:
        return int(self._counters[0])

    def wait(self, request_id: str, heard: int, timeout_s: float) -> bool:
        number = _counter(request_id)
        seconds = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        _syscall(_FUTEX, ctypes.addressof(self._counters) + 4 * number, _WAIT, heard, ctypes.addressof(seconds))
        return bool(self._counters[number] != heard)


def _take_down(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


class Listener:
    """A consumer's ear: hangs up a bell when it first listens; where there is no place for one, a wait is a sleep. Thread-safe."""

    def __init__(self, scope: str) -> None:
        self._scope = scope
        self._bell: _Bell | None = None
        self._tried = False
        self._lock = threading.Lock()

    def heard(self, request_id: str) -> int | None:
        """Return how often the bell rang for a request, or others like it; ask before looking at the store."""
        return None if self._bell is None else self._bell.heard(request_id)

    def rung(self) -> int | None:
        """Return how often the bell rang at all, hanging it up if need be; None without one."""
        if not self._tried:
            self._hang_up()
        return None if self._bell is None else self._bell.rung()

    def wait(self, request_id: str, heard: int | None, timeout_s: float) -> bool:
        """Sleep until the bell has rung more often than was heard, or for so many seconds; whether it rang."""
        bell = self._bell
        if bell is None or heard is None:
            self._hang_up()
            time.sleep(timeout_s)
            return False
        return bell.wait(request_id, heard, timeout_s)

    def _hang_up(self) -> None:
        with self._lock:
            if not self._tried:
                self._tried = True
                with contextlib.suppress(OSError):
                    self._bell = _Bell(self._scope)

    def close(self) -> None:
        """Take the bell down; who waits sleeps on for as long as it meant to."""
        with self._lock:
            self._tried = True
            if self._bell is not None:
                self._bell.close()


def _stat(path: str) -> int:
    return os.stat(path).st_mtime_ns


_modified_ns = _stat if native is None else native.modified_ns


class Bells:
    """The bells that a producer can see. Thread-safe.

    Parameters
    ----------
    scope
        Namespace and edge, see `omni_connector_core.store.names`; as of the listeners.
    """

    def __init__(self, scope: str) -> None:
        self._folder = str(own_host.folder_for(KIND, this_process().host))
        with contextlib.suppress(OSError):  # no place for bells: none is ever seen
            own_host.open_folder(KIND)
        self._mark = f"-{_edge(scope)}-"
        self._changed_ns = -1
        self._bells: dict[str, Any] = {}
        self._lock = threading.Lock()

    def ring(self, request_id: str) -> None:
        """Say that there is something new of a request."""
        try:
            changed_ns = _modified_ns(self._folder)
            if changed_ns != self._changed_ns:
                self._look(changed_ns)
        except OSError:  # there is no place for bells, or somebody cleaned up
            return
        if self._bells:
            number = _counter(request_id)
            for counters in tuple(self._bells.values()):
                counters[0] += 1
                counters[number] += 1
                address = ctypes.addressof(counters) + 4 * number
                _syscall_keeping_gil(_FUTEX, address, _WAKE, _EVERYBODY, None)

    def _look(self, changed_ns: int) -> None:
        own_host.require_private(Path(self._folder))
        with self._lock:
            names = {name for name in os.listdir(self._folder) if self._mark in name and name[0] != "."}
            for name in self._bells.keys() - names:
                del self._bells[name]
            for name in names - self._bells.keys():
                with contextlib.suppress(OSError):  # taken down meanwhile, or no bell
                    self._bells[name] = _opened(f"{self._folder}/{name}")
            self._changed_ns = changed_ns if time.time_ns() - changed_ns > TICK_NS else -1


def _opened(path: str) -> Any:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _counters(fd)
    finally:
        os.close(fd)

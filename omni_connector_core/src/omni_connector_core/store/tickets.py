"""Reads on a producer's own host, decided without a request to the store.

A *ticket* is an empty file that is good for reading one payload::

    /dev/shm/omni-connector-<uid>/tickets-<pid namespace>/<pid>-<started>-<incarnation>/<generation>

Who removes it has the read: the kernel lets exactly one succeed, in some 8 us, where a store's own atomic operation takes a
request. The producer issues a ticket when it puts a payload, and takes it itself when the payload expires, is failed, cleaned up
or overwritten. Consumers that cannot see the folder (another host, another user, a container with a ``/dev/shm`` of its
own) ask the producer once to *hand over*: it takes the folder away, so that nobody can remove a ticket any more, and from then on
every read of it is decided by `omni_connector_core.store.objects.ObjectStore.take`.

The folder's name tells whose it is; what a dead producer left is removed by the next one that comes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import threading
from pathlib import Path

from omni_connector_core.store.liveness import Process
from omni_connector_core.store.records import Slot

__all__ = ["Tickets", "folder_of", "is_there", "take"]


def _base(host: str) -> Path:
    return Path(f"/dev/shm/omni-connector-{os.getuid()}/tickets-{host.rpartition('/')[2]}")


@functools.lru_cache(maxsize=256)
def folder_of(slot: Slot) -> str | None:
    """Return the folder of a producer's tickets; None for a producer of another host."""
    process = slot.process
    return f"{_base(process.host)}/{process.pid}-{process.started}-{slot.incarnation}" if process.here() else None


def take(folder: str, generation: int) -> bool:
    """Take the ticket of a payload; of all callers exactly one is told True."""
    try:
        os.unlink(f"{folder}/{generation}")
    except FileNotFoundError:
        return False
    return True


def is_there(folder: str, generation: int) -> bool:
    """Whether a payload's ticket has not been taken."""
    return os.access(f"{folder}/{generation}", os.F_OK)


class Tickets:
    """The tickets of one open producer. Thread-safe.

    Parameters
    ----------
    slot
        Whose they are.
    wanted
        False: there are none, and the store decides about all reads.

    Attributes
    ----------
    open
        Whether new payloads get one: not after `hand_over`, nor where the folder cannot be made.
    """

    def __init__(self, slot: Slot, *, wanted: bool) -> None:
        self.open = False
        self._folder = folder_of(slot) or ""
        self._issued: set[int] = set()
        self._lock = threading.Lock()
        if wanted:
            with contextlib.suppress(OSError):
                self._open(Path(self._folder).parent, slot.process.host)

    def _open(self, base: Path, host: str) -> None:
        for folder in (base.parent, base):
            folder.mkdir(mode=0o700, exist_ok=True)
        if _private(base.parent) and _private(base):
            _sweep(base, host)
            os.mkdir(self._folder, 0o700)
            self.open = True

    def issue(self, generation: int) -> bool:
        """Issue the ticket of a payload that is about to be put; False when the store decides about its reads."""
        with self._lock:
            if not self.open:
                return False
            try:
                os.close(os.open(f"{self._folder}/{generation}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except OSError:  # the file system is full, or somebody cleaned up
                return False
            self._issued.add(generation)
            return True

    def take(self, generation: int) -> bool | None:
        """Take a ticket; False when somebody has had it, None when the payload has none."""
        with self._lock:
            if generation not in self._issued:
                return None
            self._issued.discard(generation)
            return take(self._folder, generation)

    def left(self, generation: int) -> bool | None:
        """Whether a ticket has not been taken; None when the payload has none."""
        return is_there(self._folder, generation) if generation in self._issued else None

    def hand_over(self) -> list[int]:
        """Take every ticket away; returns the generations whose ticket had been taken before."""
        with self._lock:
            if not self.open:
                return []
            self.open = False
            away = f"{self._folder}-over"
            with contextlib.suppress(FileNotFoundError):  # somebody cleaned up: rather lost than read twice
                os.rename(self._folder, away)
            read = [generation for generation in self._issued if not take(away, generation)]
            self._issued.clear()
            self._folder = away
            return read

    def close(self) -> None:
        """Remove the folder."""
        with self._lock:
            self.open = False
            self._issued.clear()
            shutil.rmtree(self._folder, ignore_errors=True)


def _private(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _sweep(base: Path, host: str) -> None:
    """Remove the folders of producers of this host that died."""
    for entry in os.listdir(base):
        pid, _, rest = entry.partition("-")
        started, _, _ = rest.partition("-")
        if pid.isdigit() and started.isdigit() and Process(host, int(pid), int(started)).dead():
            shutil.rmtree(base / entry, ignore_errors=True)

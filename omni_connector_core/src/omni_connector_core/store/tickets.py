"""Reads on a producer's own host, decided without a request to the store.

A *ticket* is an empty file that is good for reading one payload, ``<folder>/<generation>``; the folder is the producer's (see
`omni_connector_core.store.own_host`). Who removes it has the read: the kernel lets exactly one succeed, in some 8 us, where a
store's own atomic operation takes a request. The producer issues a ticket when it puts a payload, and takes it itself when the
payload expires, is failed, cleaned up or overwritten. Consumers that cannot see the folder (another host, another user, a
container with a ``/dev/shm`` of its own) ask the producer once to *hand over*: it takes the folder away, so that nobody can
remove a ticket any more, and from then on every read of it is decided by
`omni_connector_core.store.objects.ObjectStore.take`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading

from omni_connector_core.store import own_host
from omni_connector_core.store.records import Slot

__all__ = ["Tickets", "folder_of", "is_there", "take"]


@functools.lru_cache(maxsize=256)
def folder_of(slot: Slot) -> str | None:
    """Return the folder of a producer's tickets; None for a producer of another host."""
    process = slot.process
    if not process.here():
        return None
    return str(own_host.folder_for("tickets", process.host) / own_host.owned_name(process, slot.incarnation))


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
                own_host.open_folder("tickets")
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

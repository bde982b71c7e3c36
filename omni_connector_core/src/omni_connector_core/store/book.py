"""What a producer remembers of the keys whose descriptors it keeps in the store. Pure state, no store, no thread."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from omni_connector_core.errors import RequestAbandonedError
from omni_connector_core.key import Key
from omni_connector_core.recent import MEMORY_OF_ENDINGS_S

__all__ = ["MEMORY_OF_ENDINGS_S", "Book", "Entry"]

NameT = TypeVar("NameT")


class Entry(msgspec.Struct, eq=False):
    """A payload that was put, and, as far as its producer knows, not yet read by all its readers."""

    key: Key
    generation: int
    nbytes: int
    readers: int
    born_s: float
    expires_s: float


class Book:
    """Live payloads, endings and abandoned requests of one producer. Thread-safe.

    Attributes
    ----------
    live
        Payload by key.
    endings
        Keys whose descriptor tells an ending, with the time at which that may be forgotten.
    held_bytes
        Bytes of the live payloads, and of those that are being put.
    expired
        How many payloads expired unread.
    generations
        Numbers for new payloads.
    """

    def __init__(self) -> None:
        self.live: dict[Key, Entry] = {}
        self.endings: dict[Key, float] = {}
        self.abandoned: dict[str, float] = {}
        self.held_bytes = 0
        self.expired = 0
        self._by_request: dict[str, set[Key]] = {}
        self.generations = itertools.count(1)
        self._lock = threading.Lock()
        self._busy: set[Key] = set()
        self._idle = threading.Condition(self._lock)
        self._waiting = 0

    @contextmanager
    def changing(self, key: Key) -> Iterator[None]:
        """Hold a key while its objects change: put, fail, expiry and cleanup of one key come one after the other."""
        self.hold(key)
        try:
            yield
        finally:
            self.release((key,))

    def hold(self, key: Key) -> None:
        """Begin what `changing` does; the caller ends it by `release`. A put would pay six calls for a context manager."""
        with self._lock:
            while key in self._busy:
                self._waiting += 1
                self._idle.wait()
                self._waiting -= 1
            self._busy.add(key)

    @contextmanager
    def changing_idle(self, keys: Iterable[Key]) -> Iterator[list[Key]]:
        """Hold those of the keys that nobody holds; gives them. Never waits."""
        with self._lock:
            held = [key for key in keys if key not in self._busy]
            self._busy.update(held)
        try:
            yield held
        finally:
            self.release(held)

    def release(self, keys: Iterable[Key]) -> None:
        """Let go of keys that are held."""
        with self._lock:
            self._busy.difference_update(keys)
            if self._waiting:
                self._idle.notify_all()

    def check(self, key: Key) -> None:
        """Raise when the key's request was abandoned."""
        if key.request_id in self.abandoned:
            raise RequestAbandonedError("the request was cleaned up; nothing more is taken for it")

    def reserve(self, nbytes: int, capacity_bytes: int | None) -> bool:
        """Take room for a payload that is about to be put; False when there is too little."""
        with self._lock:
            if capacity_bytes is not None and self.held_bytes + nbytes > capacity_bytes:
                return False
            self.held_bytes += nbytes
            return True

    def unreserve(self, nbytes: int) -> None:
        """Give back the room of a payload that was not put."""
        with self._lock:
            self.held_bytes -= nbytes

    def add(self, entry: Entry) -> None:
        """Enter a payload whose room was reserved; replaces what was said of its key."""
        key = entry.key
        with self._lock:
            if key in self.live or key in self.endings:
                self._drop(key)
                self.endings.pop(key, None)
            self.live[key] = entry
            keys = self._by_request.get(key.request_id)
            if keys is None:
                self._by_request[key.request_id] = {key}
            else:
                keys.add(key)

    def end(self, key: Key) -> None:
        """Note that the key's descriptor tells an ending now."""
        with self._lock:
            self._drop(key)
            self.endings.pop(key, None)  # both stand in the order of their times
            self.endings[key] = time.monotonic() + MEMORY_OF_ENDINGS_S

    def forget(self, key: Key) -> None:
        """Note that the key has no descriptor any more."""
        with self._lock:
            self._drop(key)
            self.endings.pop(key, None)

    def abandon(self, request_id: str) -> list[Key]:
        """Refuse a request from now on; returns its live keys."""
        with self._lock:
            self.abandoned.pop(request_id, None)
            self.abandoned[request_id] = time.monotonic() + MEMORY_OF_ENDINGS_S
            return sorted(self._by_request.get(request_id, ()))

    def entries(self) -> list[Entry]:
        """Return the live payloads."""
        with self._lock:
            return list(self.live.values())

    def outdated(self) -> tuple[list[Key], list[str]]:
        """Return the keys and the abandoned requests whose endings may be forgotten."""
        now = time.monotonic()
        with self._lock:
            return list(_until(self.endings, now)), list(_until(self.abandoned, now))

    def readmit(self, request_id: str) -> None:
        """Forget that a request was abandoned."""
        with self._lock:
            self.abandoned.pop(request_id, None)

    def _drop(self, key: Key) -> None:
        entry = self.live.pop(key, None)
        if entry is not None:
            self.held_bytes -= entry.nbytes
            keys = self._by_request[key.request_id]
            keys.discard(key)
            if not keys:
                del self._by_request[key.request_id]


def _until(times: dict[NameT, float], now: float) -> Iterator[NameT]:
    """List what stands before the first time that has not come; looks at nothing behind it."""
    return itertools.takewhile(lambda name: times[name] <= now, times)

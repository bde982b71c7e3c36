# SPDX-License-Identifier: Apache-2.0
"""Keys whose payload could not be put."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from omni_connector_core import Edge

__all__ = ["LostKeys"]

_REMEMBERED_S = 60.0
_TELL_EVERY_S = 0.5


@dataclass
class _Lost:
    reason: str
    until_s: float
    told: bool = False


class LostKeys:
    """Remembers lost keys while the engine may still send something else under them, and tells who waits for them.

    Consumers are told by a thread that lives as long as there is something to tell: what made the put fail (a service that
    is away) may well make the telling fail too, for a while.

    Parameters
    ----------
    tell
        Tells the consumers of a key for which reason it is lost; returns whether that worked.

    Attributes
    ----------
    keys
        The lost ones; as long as there are none, nothing need be asked.
    """

    def __init__(self, tell: Callable[[Edge, str, str], bool]) -> None:
        self._tell = tell
        self.keys: dict[tuple[Edge, str], _Lost] = {}
        self._lock = threading.Lock()
        self._teller: threading.Thread | None = None
        self._closed = threading.Event()

    def add(self, edge: Edge, key: str, reason: str) -> None:
        """Remember a key and tell its consumers, now or when that is possible; forget what is a minute old."""
        now_s = time.monotonic()
        with self._lock:
            self.keys = {name: lost for name, lost in self.keys.items() if lost.until_s > now_s}
            self.keys[edge, key] = _Lost(reason, now_s + _REMEMBERED_S)
            if self._teller is None and not self._closed.is_set():
                self._teller = threading.Thread(target=self._run, name="omni-connector-lost", daemon=True)
                self._teller.start()

    def holds(self, edge: Edge, key: str) -> bool:
        """Whether a key is lost. Asking keeps it so."""
        now_s = time.monotonic()
        with self._lock:
            lost = self.keys.get((edge, key))
            if lost is None or lost.until_s <= now_s:
                return False
            lost.until_s = now_s + _REMEMBERED_S
            return True

    def close(self) -> None:
        """Tell nobody any more."""
        self._closed.set()
        with self._lock:
            teller = self._teller
        if teller is not None:
            teller.join()

    def _run(self) -> None:
        while untold := self._untold():
            for edge, key, lost in untold:
                lost.told = self._tell(edge, key, lost.reason)
            if self._closed.wait(0 if all(lost.told for *_, lost in untold) else _TELL_EVERY_S):
                return

    def _untold(self) -> list[tuple[Edge, str, _Lost]]:
        now_s = time.monotonic()
        with self._lock:
            untold = [(*name, lost) for name, lost in self.keys.items() if not lost.told and lost.until_s > now_s]
            if not untold:
                self._teller = None
        return untold

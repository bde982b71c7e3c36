# SPDX-License-Identifier: Apache-2.0
"""Keys whose payload could not be put."""

from __future__ import annotations

import time

from omni_connector_core import Edge

_REMEMBERED_S = 60.0


class LostKeys:
    """Remembers lost keys while the engine may still send something else under them, and a minute longer."""

    def __init__(self) -> None:
        self._until_s: dict[tuple[Edge, str], float] = {}

    def add(self, edge: Edge, key: str) -> None:
        """Remember a key; forget what is a minute old."""
        now_s = time.monotonic()
        self._until_s = {lost: until_s for lost, until_s in self._until_s.items() if until_s > now_s}
        self._until_s[edge, key] = now_s + _REMEMBERED_S

    def holds(self, edge: Edge, key: str) -> bool:
        """Whether a key is lost. Asking keeps it so."""
        if not self._until_s:
            return False
        until_s = self._until_s.get((edge, key))
        if until_s is None or until_s <= time.monotonic():
            return False
        self.add(edge, key)
        return True

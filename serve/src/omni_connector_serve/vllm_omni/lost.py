# SPDX-License-Identifier: Apache-2.0
"""Keys whose payload could not be put."""

from __future__ import annotations

import time
from dataclasses import dataclass

from omni_connector_core import Edge

_REMEMBERED_S = 60.0


@dataclass
class _Lost:
    reason: str
    until_s: float
    told: bool = False


class LostKeys:
    """Remembers lost keys while the engine may still send something else under them, and a minute longer."""

    def __init__(self) -> None:
        self._lost: dict[tuple[Edge, str], _Lost] = {}

    def add(self, edge: Edge, key: str, reason: str) -> None:
        """Remember a key, whose consumers are still to be told; forget what is a minute old."""
        now_s = time.monotonic()
        self._lost = {name: lost for name, lost in self._lost.items() if lost.until_s > now_s}
        self._lost[edge, key] = _Lost(reason, now_s + _REMEMBERED_S)

    def holds(self, edge: Edge, key: str) -> bool:
        """Whether a key is lost. Asking keeps it so."""
        lost = self._lost.get((edge, key))
        now_s = time.monotonic()
        if lost is None or lost.until_s <= now_s:
            return False
        lost.until_s = now_s + _REMEMBERED_S
        return True

    def untold(self) -> list[tuple[Edge, str, str]]:
        """Edge, key and reason of what consumers still wait for."""
        return [(*name, lost.reason) for name, lost in self._lost.items() if not lost.told]

    def told(self, edge: Edge, key: str) -> None:
        """The consumers of a key know."""
        if (lost := self._lost.get((edge, key))) is not None:
            lost.told = True

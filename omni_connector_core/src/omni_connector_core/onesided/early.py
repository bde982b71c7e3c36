"""Questions that came before any producer that could answer them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from omni_connector_core.onesided.messages import Ask

__all__ = ["Early"]

ClientT = TypeVar("ClientT")


class Early(Generic[ClientT]):
    """Questions by who asked and their number; every operation on one is O(1)."""

    def __init__(self) -> None:
        self._asks: dict[ClientT, dict[int, Ask]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, client: ClientT) -> bool:
        return client in self._asks

    def add(self, client: ClientT, ask: Ask) -> None:
        """Keep a question; one that is asked again is kept once."""
        asks = self._asks.setdefault(client, {})
        self._count += ask.number not in asks
        asks[ask.number] = ask

    def forget(self, client: ClientT, number: int) -> None:
        """Drop a question; harmless when there is none."""
        asks = self._asks.get(client)
        if asks is not None and asks.pop(number, None) is not None:
            self._count -= 1
            if not asks:
                del self._asks[client]

    def forget_all(self, client: ClientT) -> None:
        """Drop every question of a client."""
        self._count -= len(self._asks.pop(client, ()))

    def take_all(self) -> Iterator[tuple[ClientT, Ask]]:
        """Take every question out."""
        taken, self._asks, self._count = self._asks, {}, 0
        for client, asks in taken.items():
            for ask in asks.values():
                yield client, ask

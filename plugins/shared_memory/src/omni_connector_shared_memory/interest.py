"""What a consumer is waiting for: one key, and what each producer that was asked has said of it so far."""

from __future__ import annotations

import time
from typing import NamedTuple

from omni_connector_core.errors import OmniConnectorError
from omni_connector_core.key import Key, Producer

from omni_connector_shared_memory import protocol
from omni_connector_shared_memory.link import Link
from omni_connector_shared_memory.meeting import Address

__all__ = ["Claimed", "Interest", "Target"]

SILENCE_S = 0.5
"""How long a producer that holds a key waits, so to say, for the others to say that they do not hold it as well."""


class Target(NamedTuple):
    """What is asked for: a key, and whose, if that was said.

    Attributes
    ----------
    incarnation
        Which life of the producer is meant; metadata says so.
    """

    key: Key
    producer: Producer | None = None
    incarnation: str | None = None

    def means(self, address: Address) -> bool:
        """Whether a producing end may have what is meant."""
        return self.producer in (None, address.producer) and self.incarnation in (None, address.incarnation)


class Claimed(NamedTuple):
    """A claim on a payload, not used yet."""

    link: Link
    found: protocol.Find


class Interest:
    """A target that is being waited for."""

    __slots__ = ("_found_s", "asked", "error", "found", "silent", "target")

    def __init__(self, target: Target) -> None:
        self.target = target
        self.asked: dict[Link, int] = {}
        """Number of the lookup at each producer that was asked."""
        self.silent: set[Link] = set()
        """Those that have not answered."""
        self.found: list[Claimed] = []
        self.error: OmniConnectorError | None = None
        self._found_s = 0.0

    def wants(self, link: Link) -> bool:
        """Whether the producer at the other end of a link may have what is wanted, and was not asked."""
        return self.target.means(link.address) and link not in self.asked

    def answered(self, link: Link, found: protocol.Find | None = None) -> None:
        """Note what a producer said."""
        self.silent.discard(link)
        if found is not None:
            if not self.found:
                self._found_s = time.monotonic()
            self.found.append(Claimed(link, found))

    def lost(self, link: Link) -> None:
        """Note that a producer is gone; a claim that it gave before stays good, for the memory is mapped."""
        self.asked.pop(link, None)
        self.silent.discard(link)

    def ripe_in_s(self) -> float | None:
        """Seconds until what was found may be taken; None when nothing was found."""
        if not self.found:
            return None
        if not self.silent:
            return 0.0
        return max(self._found_s + SILENCE_S - time.monotonic(), 0.0)

"""What a consumer is waiting for: one key, and what each producer that was asked has said of it so far."""

from __future__ import annotations

import time

import msgspec

from omni_connector_core.errors import AmbiguousKeyError, OmniConnectorError, PeerLostError
from omni_connector_core.key import Key, Producer
from omni_connector_shared_memory import protocol
from omni_connector_shared_memory.link import Link
from omni_connector_shared_memory.meeting import Address

__all__ = ["Claimed", "Interest", "Target"]

SILENCE_S = 0.5
"""How long a claim is kept back for other producers to say that they do not hold the key as well."""


class Target(msgspec.Struct, frozen=True):
    """What is asked for: a key, and whose, if that was said.

    Attributes
    ----------
    incarnation
        Which life of the producer is meant; metadata says so.
    """

    key: Key
    producer: Producer | None = None
    incarnation: str | None = None

    @property
    def anybody(self) -> bool:
        """Whether it does not matter whose it is."""
        return self.producer is None and self.incarnation is None

    def means(self, address: Address) -> bool:
        """Whether a producing end may have what is meant."""
        return self.producer in (None, address.producer) and self.incarnation in (None, address.incarnation)


class Claimed(msgspec.Struct, frozen=True):
    """A claim on a payload, not used yet."""

    link: Link
    found: protocol.Find


class Interest:
    """A key that is being waited for, on behalf of one target or several.

    Attributes
    ----------
    targets
        What is wanted of the key.
    asked
        Number of the open lookup at each producer that was asked and has not given its last word.
    silent
        Those of them that have said nothing at all yet.
    found
        Claims that were given, not used yet.
    ended
        Why a producer will not give one.
    """

    __slots__ = ("_found_s", "asked", "ended", "found", "key", "silent", "targets")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.targets: set[Target] = set()
        self.asked: dict[Link, int] = {}
        self.silent: set[Link] = set()
        self.found: dict[Link, protocol.Find] = {}
        self.ended: dict[Link, OmniConnectorError] = {}
        self._found_s = 0.0

    def wants(self, link: Link) -> bool:
        """Whether a producer may have what is wanted, and has to be asked."""
        if link in self.asked or link in self.found or link in self.ended:
            return False
        return self.means(link)

    def means(self, link: Link) -> bool:
        """Whether a producer may have what is wanted."""
        return any(target.means(link.address) for target in self.targets)

    def answered(self, link: Link, answer: protocol.Find | OmniConnectorError | None) -> None:
        """Note what a producer said: a claim, why there will be none, or None, that there is none yet."""
        self.silent.discard(link)
        if isinstance(answer, OmniConnectorError):
            self.asked.pop(link, None)
            self.ended[link] = answer
        elif answer is not None:
            self.asked.pop(link, None)
            self.found[link] = answer
            self._found_s = time.monotonic()

    def outcome(self, target: Target) -> Claimed | OmniConnectorError | None:
        """Return what has become of a target; None while that is open. A claim is taken out, so it is given once."""
        if not self.found and not self.ended:
            return None
        if not self.silent and not self.ended and len(self.found) == 1 and target.anybody:
            return Claimed(*self.found.popitem())
        found = [link for link in self.found if target.means(link.address)]
        if found:
            silent = any(target.means(link.address) for link in self.silent)
            if silent and time.monotonic() < self._found_s + SILENCE_S:
                return None
            if len(found) > 1:
                names = " and by ".join(sorted(str(link.address) for link in found))
                return AmbiguousKeyError(
                    f"held by {names}", hint="Pass the metadata, or producer=, to say whose is meant"
                )
            return Claimed(found[0], self.found.pop(found[0]))
        errors = [error for link, error in self.ended.items() if target.means(link.address)]
        if errors:
            lost = all(isinstance(error, PeerLostError) for error in errors)
            if not lost or not any(target.means(link.address) for link in self.asked):
                return min(errors, key=lambda error: isinstance(error, PeerLostError))
        return None

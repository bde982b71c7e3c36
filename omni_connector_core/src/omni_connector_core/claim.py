"""What a producer's book (see `ledger`) holds: payloads, and the claims that readers have on them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from omni_connector_core.key import Key

__all__ = ["Claim", "Entry", "ItemT", "Pending", "Reader"]

ItemT = TypeVar("ItemT")
Reader = Hashable


class Entry(msgspec.Struct, Generic[ItemT], eq=False):
    """One payload: what was put, how many reads are left to claim, and how many claims are out.

    Attributes
    ----------
    dropped
        It was taken out of reach while it had a read left.
    final
        A read that is given back goes to nobody: the payload was overwritten, or it ended.
    """

    key: Key
    item: ItemT
    nbytes: int
    generation: int
    unclaimed: int
    born_s: float
    expires_s: float
    out: int = 0
    dropped: bool = False
    final: bool = False


class Claim(msgspec.Struct, Generic[ItemT], eq=False):
    """One reader's right to one read of a payload, held until `Ledger.release`.

    Attributes
    ----------
    number
        Names the claim in messages.
    item
        The backend's handle on the payload's memory, which stays as it is while the claim is out.
    """

    number: int
    reader: Reader
    entry: Entry[ItemT]

    @property
    def item(self) -> ItemT:
        """The backend's handle on the payload's memory."""
        return self.entry.item

    @property
    def key(self) -> Key:
        """The payload's key."""
        return self.entry.key

    @property
    def generation(self) -> int:
        """Which put of the key this is; rises with every put of this producer."""
        return self.entry.generation

    @property
    def nbytes(self) -> int:
        """Size of the payload's frame in bytes."""
        return self.entry.nbytes

    @property
    def expires_s(self) -> float:
        """When the payload expires, if it is unread by then (monotonic clock)."""
        return self.entry.expires_s


@dataclass(frozen=True, slots=True)
class Pending:
    """Unread payloads: how many, how old the oldest is (seconds), how many bytes."""

    count: int
    oldest_age_s: float
    nbytes: int

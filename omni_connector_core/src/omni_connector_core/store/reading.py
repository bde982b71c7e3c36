"""Reading small objects of several producers, of which one may have stopped answering."""

from __future__ import annotations

from collections.abc import Sequence

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import TransferTimeoutError
from omni_connector_core.store.objects import ObjectStore

__all__ = ["load_readable"]

BATCH = 256
"""Names in one call."""
BATCH_S, SINGLE_S = 1.0, 0.25
"""How long a batch, and then each name of a batch that did not come back, is waited for, seconds."""


def load_readable(store: ObjectStore, names: Sequence[str], deadline: Deadline) -> list[bytes | None]:
    """Read small objects; None for those that are not there, or whose keeper hangs (a stopped process, a cut link).

    Round trips: 1 for each `BATCH` names.
    """
    found: list[bytes | None] = []
    for start in range(0, len(names), BATCH):
        batch = names[start : start + BATCH]
        try:
            found += store.load(batch, deadline=Deadline(min(BATCH_S, deadline.remaining_s())))
        except TransferTimeoutError:
            found += [_one(store, name, deadline) if len(batch) > 1 else None for name in batch]
    return found


def _one(store: ObjectStore, name: str, deadline: Deadline) -> bytes | None:
    try:
        (data,) = store.load([name], deadline=Deadline(min(SINGLE_S, deadline.remaining_s())))
    except TransferTimeoutError:
        return None
    return data

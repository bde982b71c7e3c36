"""Abandoned requests, posted where producers that join later read them.

A notice is a small object in one of `BOARD` numbered places of an edge; whoever posts claims a free one. Producers read the
board once, when they join; those that are there already are asked directly. Notices older than the memory of endings are
taken down by whoever meets them; on a full board a random one makes room.
"""

from __future__ import annotations

import random
import time

import msgspec

from omni_connector_core.deadline import Deadline
from omni_connector_core.recent import MEMORY_OF_ENDINGS_S
from omni_connector_core.store.names import Names
from omni_connector_core.store.objects import ObjectStore
from omni_connector_core.store.reading import load_readable
from omni_connector_core.store.records import pack, unpack

__all__ = ["post", "read"]

BOARD = 256
"""Notices of one edge that are remembered; one call asks for all of them (0.13 ms on Mooncake)."""


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """A request was abandoned, at this time of the wall clock (hosts may differ by seconds)."""

    request_id: str
    when_s: float


def post(store: ObjectStore, names: Names, request_id: str, deadline: Deadline) -> None:
    """Post a notice. Round trips: 1 to see the board, 1 to claim a place."""
    board = [names.notice(number) for number in range(BOARD)]
    notice = Notice(request_id, time.time())
    there = store.exist(board, deadline=deadline)
    free = [name for name, taken in zip(board, there, strict=True) if not taken]
    random.shuffle(free)
    while True:
        if not free:
            free.append(random.choice(board))
            store.remove(free, deadline=deadline)
        place = free.pop()
        if store.claim(place, pack(place, notice), ttl_s=MEMORY_OF_ENDINGS_S, deadline=deadline):
            return


def read(store: ObjectStore, names: Names, deadline: Deadline) -> set[str]:
    """Read the board. Round trips: 1, 1 for what is posted, 1 to take down what is old."""
    board = [names.notice(number) for number in range(BOARD)]
    there = store.exist(board, deadline=deadline)
    posted = [name for name, taken in zip(board, there, strict=True) if taken]
    if not posted:
        return set()
    data = load_readable(store, posted, deadline)
    notices = [unpack(name, raw, Notice) for name, raw in zip(posted, data, strict=True)]
    oldest_s = time.time() - MEMORY_OF_ENDINGS_S
    old = [n for n, notice in zip(posted, notices, strict=True) if notice is not None and notice.when_s < oldest_s]
    if old:
        store.remove(old, deadline=deadline)
    return {notice.request_id for notice in notices if notice is not None and notice.when_s >= oldest_s}

"""A memory of what happened lately, as large as what happened lately and no larger."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TypeVar

__all__ = ["MEMORY_OF_ENDINGS_S", "Recent"]

MEMORY_OF_ENDINGS_S = 600.0
"""For how long a consumer that comes late learns why it gets nothing, seconds."""

NameT = TypeVar("NameT")
WhatT = TypeVar("WhatT")


class Recent(OrderedDict[NameT, tuple[float, WhatT]]):
    """What happened, by name, with the time at which it may be forgotten (monotonic clock).

    It stands in the order of these times, so noting and forgetting cost the same however much there is. Not thread-safe.

    Parameters
    ----------
    seconds
        For how long to remember.
    """

    def __init__(self, seconds: float = MEMORY_OF_ENDINGS_S) -> None:
        super().__init__()
        self._seconds = seconds

    def note(self, name: NameT, what: WhatT) -> None:
        """Remember something from now on, in place of what was known of that name; forget what is old."""
        now = time.monotonic()
        self.forget_old(now)
        self[name] = (now + self._seconds, what)
        self.move_to_end(name)

    def forget_old(self, now: float) -> None:
        """Forget what may be forgotten by a point in time."""
        while self:
            name = next(iter(self))
            if self[name][0] > now:
                return
            del self[name]

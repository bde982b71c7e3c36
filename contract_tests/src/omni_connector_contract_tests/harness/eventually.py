"""Waits for something to become true, with a deadline instead of a sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["WITHIN_A_SECOND_S", "WITHIN_SECONDS_S", "eventually", "limit_patience"]

WITHIN_A_SECOND_S = 1.0
"""The contract's "within a second"."""
WITHIN_SECONDS_S = 5.0
"""The contract's "within seconds"."""

ValueT = TypeVar("ValueT")
_longest_s = WITHIN_SECONDS_S


def limit_patience(seconds: float) -> None:
    """Let no `eventually` of this process wait longer than `seconds`."""
    global _longest_s
    _longest_s = min(seconds, WITHIN_SECONDS_S)


def eventually(look: Callable[[], ValueT], *, within_s: float = WITHIN_SECONDS_S, message: str = "") -> ValueT:
    """Look until there is something true to see, and return it.

    Raises
    ------
    AssertionError
        Nothing true was seen by the deadline; tells what was seen last.
    """
    within_s = min(within_s, _longest_s)
    end_s = time.monotonic() + within_s
    pause_s = 0.0005
    while not (seen := look()):
        if time.monotonic() >= end_s:
            raise AssertionError(f"not within {within_s:g} s: {message or look}; last seen: {seen!r}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.02)
    return seen

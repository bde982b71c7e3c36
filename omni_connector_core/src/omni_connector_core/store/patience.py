"""Trying again while the service does not answer: it may be starting, coming back, or busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import BackendUnavailableError

__all__ = ["patiently"]

ResultT = TypeVar("ResultT")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 200e-6, 0.05


def patiently(
    operation: Callable[[], ResultT], deadline: Deadline, *, check: Callable[[], None] = lambda: None
) -> ResultT:
    """Try an operation that may be repeated until the service answers, to the deadline.

    Parameters
    ----------
    check
        Called before each further attempt; raises when there shall be none.

    Raises
    ------
    BackendUnavailableError
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return operation()
        except BackendUnavailableError:
            if deadline.expired():
                raise
        time.sleep(min(pause_s, deadline.remaining_s()))
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
        check()

"""One request in one stage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omni_connector_serve.runtime.messages import Done, Failed, Output, Run

__all__ = ["Execution"]


class Execution:
    """One request for one stage.

    Attributes
    ----------
    outcome : Future of list of Done
        One `Done` a rank, or the `ServeError` of the first that failed. Cancelled by who no longer wants it.
    taken : bool
        Whether a rank has begun with it.
    """

    def __init__(self, run: Run, on_output: Callable[[Output], None]) -> None:
        self.run = run
        self.on_output = on_output
        self.outcome: asyncio.Future[list[Done]] = asyncio.get_running_loop().create_future()
        self.outcome.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.taken = False
        self.done: dict[int, Done | Failed] = {}
        self.timer: asyncio.TimerHandle | None = None

    def fail(self, error: Exception) -> None:
        """End it with `error`, unless it has ended."""
        if not self.outcome.done():
            self.outcome.set_exception(error)

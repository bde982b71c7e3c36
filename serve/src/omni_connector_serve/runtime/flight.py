"""One client's request on its way through a pipeline, as the HTTP door sees it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from omni_connector_serve.runtime.messages import EdgeUse

__all__ = ["Flight"]

_CHUNKS_AHEAD = 8


class Flight:
    """One request on its way.

    Attributes
    ----------
    request_id : str
    edges : list of EdgeUse
        What the stages moved for it, once it is over.
    busy_s : dict of str to float
        Time that each stage had it.
    within : set of str
        The stages that have it, or whose line it stands in.
    first_chunk_s, total_s : float
        Since the start.
    """

    def __init__(self, payload: Any, params: dict[str, Any], timeout_s: float) -> None:
        self.request_id = uuid.uuid4().hex
        self.payload = payload
        self.params = params
        self.deadline = time.monotonic() + timeout_s
        self.timeout_s = timeout_s
        self.edges: list[EdgeUse] = []
        self.busy_s: dict[str, float] = {}
        self.within: set[str] = set()
        self.first_chunk_s = 0.0
        self.total_s = 0.0
        self.chunks: asyncio.Queue[Any] = asyncio.Queue(_CHUNKS_AHEAD)
        self.delivered = 0
        self.started = time.monotonic()
        self.task: asyncio.Task[None] | None = None

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Iterate over what the last stages make, as it comes.

        Raises
        ------
        ServeError
            Why the request ended without a result.
        """
        assert self.task is not None
        while True:
            chunk = asyncio.ensure_future(self.chunks.get())
            try:
                await asyncio.wait((chunk, self.task), return_when=asyncio.FIRST_COMPLETED)
            finally:
                arrived = chunk.done() or not chunk.cancel()
            if not arrived:
                break
            yield chunk.result()
        while not self.chunks.empty():
            yield self.chunks.get_nowait()
        await self.task

    async def cancel(self) -> None:
        """Give the request up, wherever it is; harmless when it is over."""
        assert self.task is not None
        self.task.cancel()
        await asyncio.wait((self.task,))

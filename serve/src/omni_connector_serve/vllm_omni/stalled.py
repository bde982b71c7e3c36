# SPDX-License-Identifier: Apache-2.0
"""Ends the engine's wait for a chunk that will never come.

A connector has no return value for "never": the engine polls on until VLLM_OMNI_INPUT_WAIT_TIMEOUT_S, ten minutes unless it is set.
What it does have is a clock for each request that waits for a chunk, and a scheduler that fails a request, with an error for
its client, when that clock has run out. So the clock is let run out. It belongs to the object that polls, which is found
on the stack of the poll that failed; one of another kind (full payloads are polled in a process that has no such clock) is
left alone, and the engine's own deadline holds.
"""

from __future__ import annotations

import sys
import time

from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter

from omni_connector_core import Edge

__all__ = ["Outages", "end_wait"]

_DEPTH = 8


class Outages:
    """Since when each key's polls have met the same wall."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[Edge, str], float] = {}

    def lasting_s(self, edge: Edge, key: str) -> float:
        """One more poll has failed: for how long have they done so, seconds."""
        now_s = time.monotonic()
        return now_s - self._since_s.setdefault((edge, key), now_s)

    def over(self, edge: Edge, key: str) -> None:
        """A poll has gone through."""
        if self._since_s:
            self._since_s.pop((edge, key), None)


def end_wait(edge: Edge, key: str) -> bool:
    """Fail the request that the calling poll loop asks this key for.

    Returns
    -------
    bool
        Whether the engine could be told.
    """
    poller = _poller()
    if poller is None:
        return False
    requests = [
        request
        for request, external in list(poller.request_ids_mapping.items())
        if key.startswith(f"{external}_{edge.producer}_") and request in poller._waiting_since
    ]
    for request in requests:
        poller._waiting_since[request] = float("-inf")
    return bool(requests)


def _poller() -> OmniChunkTransferAdapter | None:
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if isinstance(poller := frame.f_locals.get("self"), OmniChunkTransferAdapter):
            return poller
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None

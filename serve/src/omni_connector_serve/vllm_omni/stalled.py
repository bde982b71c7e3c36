# SPDX-License-Identifier: Apache-2.0
"""Ends the engine's wait for a payload that will never come.

A connector has no return value for "never": the engine polls on until VLLM_OMNI_INPUT_WAIT_TIMEOUT_S, ten minutes unless it is
set, and for a KV cache until its ``recv_timeout``, after which it goes on without one. What the engine does have:

- Async chunks: a clock for each request that waits, and a scheduler that fails a request, with an error for its client, when the
  clock has run out. The clock belongs to the object that polls. So it is let run out.
- Full payloads: the same clock in the scheduler's process, and polls in a worker, which may be another process. What a worker
  knows of a request goes to the scheduler with each of its outputs. So a word is put there, and `hear_of_losses` has
  the scheduler let the clock run out.
- KV caches, and the payloads of a diffusion stage: a worker that waits inside a step. There the poll raises, which ends the wait,
  and `refuse_missing_kv` has every rank of the stage fail the request rather than run it without its cache.

Who polls is found on the stack of the poll that failed.
"""

from __future__ import annotations

import enum
import functools
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm_omni.core.sched.omni_scheduling_coordinator import OmniSchedulingCoordinator
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.distributed.omni_connectors.kv_transfer_manager import OmniKVTransferManager
from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter
from vllm_omni.worker.omni_connector_model_runner_mixin import OmniConnectorModelRunnerMixin

from omni_connector_core import Edge, TransferTimeoutError
from omni_connector_serve.vllm_omni.backends import our_names

__all__ = ["Outages", "Wait", "end_wait", "hear_of_losses", "refuse_missing_kv"]

_DEPTH = 8
_LOST = "omni_connector_lost"
_EXPIRED = float("-inf")


class Outages:
    """Since when each key's polls have met the same wall.

    Attributes
    ----------
    since_s
        On the monotonic clock; empty as a rule.
    """

    def __init__(self) -> None:
        self.since_s: dict[tuple[Edge, str], float] = {}

    def lasting_s(self, edge: Edge, key: str) -> float:
        """One more poll has failed: for how long have they done so, seconds."""
        now_s = time.monotonic()
        return now_s - self.since_s.setdefault((edge, key), now_s)

    def over(self, edge: Edge, key: str) -> None:
        """A poll has gone through."""
        self.since_s.pop((edge, key), None)


class Wait(enum.Enum):
    """What became of a wait."""

    ENDED = enum.auto()
    ENDS_IF_RAISED = enum.auto()
    GOES_ON = enum.auto()
    """Nobody of the engine's asks, or it does not wait any more."""


def end_wait(edge: Edge, key: str, reason: str) -> Wait:
    """Fail the request that the calling poll loop asks this key for.

    Parameters
    ----------
    reason
        Why the payload will not come.
    """
    match poller := _poller():
        case OmniChunkTransferAdapter():
            requests = _asked_for(key, edge, poller.request_ids_mapping) & poller._waiting_since.keys()
            for request in requests:
                poller._waiting_since[request] = _EXPIRED
        case OmniConnectorModelRunnerMixin() if not poller._synchronous_payload_transport:
            requests = _asked_for(key, edge, poller._request_ids_mapping)
            with poller._lock:
                for request in requests:
                    poller.put_local_request_metadata(request, {_LOST: reason})
        case OmniConnectorModelRunnerMixin() | OmniKVTransferManager():
            return Wait.ENDS_IF_RAISED
        case _:
            return Wait.GOES_ON
    return Wait.ENDED if requests else Wait.GOES_ON


def _asked_for(key: str, edge: Edge, external_ids: Mapping[str, str]) -> set[str]:
    """The engine's requests whose payloads have such keys."""
    names = list(external_ids.items())
    return {request for request, external in names if key.startswith(f"{external}_{edge.producer}_")}


def _poller() -> object:
    """The engine's object that polls, whose method is a few calls up."""
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        poller = frame.f_locals.get("self")
        if isinstance(poller, (OmniChunkTransferAdapter, OmniKVTransferManager, OmniConnectorModelRunnerMixin)):
            return poller
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def hear_of_losses() -> None:
    """Have a scheduler in this process fail the requests of which a worker says that their payload is lost."""
    update = OmniSchedulingCoordinator.update_request_metadata

    @functools.wraps(update)
    def update_request_metadata(
        self: OmniSchedulingCoordinator, requests: Any, request_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        for request, metadata in request_metadata.items():
            if _LOST in metadata and request in self._waiting_since:
                self._waiting_since[request] = _EXPIRED
        kept = {request: metadata for request, metadata in request_metadata.items() if _LOST not in metadata}
        update(self, requests, kept, *args, **kwargs)

    OmniSchedulingCoordinator.update_request_metadata = update_request_metadata


def refuse_missing_kv() -> None:
    """Have each rank of a diffusion stage in this process fail a request whose KV cache has not come.

    The engine's own answer is to run it without: audio or an image that has little to do with what was asked for. The two methods
    return the same on every rank, so all ranks fail the request together.
    """
    for name in ("receive_multi_kv_cache_distributed", "consume_and_distribute_kv_cache"):
        setattr(OmniKVTransferManager, name, _or_fail(getattr(OmniKVTransferManager, name)))


def _or_fail(receive: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(receive)
    def received(self: OmniKVTransferManager, req: Any, *args: Any, **kwargs: Any) -> bool:
        if receive(self, req, *args, **kwargs):
            return True
        request = self._resolve_request_id(req)
        settings = self.config.connector_config or {}
        if (
            self.config.need_recv_cache
            and settings.get("type") in our_names()
            and request is not None
            and not OmniDiffusionRequest.is_dummy_run_request_id(request)
        ):
            raise TransferTimeoutError(f"the KV cache of request {request} has not come", hint="The log says why")
        return False

    return received

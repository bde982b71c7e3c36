# SPDX-License-Identifier: Apache-2.0
"""The connector that vLLM-Omni sees: its calls on one side, omni-connector's on the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
from vllm_omni.distributed.omni_connectors.utils.config import TRANSFER_ENGINE_CONNECTOR_NAMES

from omni_connector_core import (
    NOT_READY,
    ConfigError,
    Edge,
    OmniConnector,
    OmniConnectorError,
    Role,
    TransferTimeoutError,
)
from omni_connector_serve.vllm_omni import sharing
from omni_connector_serve.vllm_omni.backends import backend_of, our_names
from omni_connector_serve.vllm_omni.deployment import EdgeSettings, current_deployment
from omni_connector_serve.vllm_omni.extra import split_extra
from omni_connector_serve.vllm_omni.lost import LostKeys
from omni_connector_serve.vllm_omni.payloads import delivered, wire_payload
from omni_connector_serve.vllm_omni.place import this_place
from omni_connector_serve.vllm_omni.polls import Polls
from omni_connector_serve.vllm_omni.report import Once, logger
from omni_connector_serve.vllm_omni.stalled import Outages, Wait, end_wait

__all__ = ["ConnectorAdapter"]

_TELL_TIMEOUT_S = 1.0
# The option of backends with a control socket.
_CONTROL_PORT = "control_port"


@dataclass(frozen=True)
class _Open:
    """An end of an edge that this instance uses."""

    end: sharing.End
    connector: OmniConnector
    polls: Polls
    readers: int
    timeout_s: float
    overwrite: bool


class ConnectorAdapter(OmniConnectorBase):  # type: ignore[misc]
    """One connector instance of the engine's, over any backend.

    It opens an end of an edge when it is first called for it: an instance that the engine never calls costs nothing.

    Parameters
    ----------
    name
        The connector's name in the deploy file.
    config
        Its ``extra``, with what the engine added. Kept as it is: the pipelines read their own options from it.

    Raises
    ------
    ConfigError, PluginError
        Options, backend or pipeline are wrong: at start, before a request waits for it.
    """

    supports_raw_data = True

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.config = config
        self.stage_id = int(config.get("stage_id", -1))
        self._settings = EdgeSettings(name, config)
        # The engine tells a connector its stage, except the one that it makes for KV caches.
        self._for_kv = "stage_id" not in config
        # By stages: what is looked up for each payload costs no call.
        self._producing: dict[tuple[str, str], _Open] = {}
        self._consuming: dict[tuple[str, str], _Open] = {}
        self._opening = threading.Lock()
        self._lost = LostKeys(self._tell_consumers)
        self._outages = Outages()
        self._once = Once()
        self._hint: dict[str, Any] | None = None
        self._check()

    def _check(self) -> None:
        _check_settings(self._settings)
        deployment = current_deployment()
        for edge in deployment.leaving(str(self.stage_id)):
            settings = deployment.edges[edge]
            if settings.name not in our_names():
                raise ConfigError(
                    f"stage {self.stage_id} sends over {settings.name}, which is not omni-connector's",
                    edge=edge,
                    hint=f"vLLM-Omni gives a stage one connector, here {self._settings.name}, for both directions: "
                    "name an omni-connector backend on this edge too",
                )
            _check_settings(settings)

    # ---- the engine's calls

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """Put a payload; retries to the option ``timeout_s``. False: it is lost, and the request with it."""
        if self._lost.keys and self._lost.holds(Edge(from_stage, to_stage), put_key):
            # The engine sends the next chunk under the key of a lost one: the consumer must not take it for that.
            return False, 0, None
        try:
            end = self._producing.get((from_stage, to_stage)) or self._open(Edge(from_stage, to_stage), Role.PRODUCER)
            metadata = end.connector.put(put_key, wire_payload(data), readers=end.readers, overwrite=end.overwrite)
        except Exception as error:  # whatever it is, the engine knows one return value for it
            edge = Edge(from_stage, to_stage)
            self._report("put", edge, put_key, error)
            self._lost.add(edge, put_key, f"put failed: {error}")
            return False, 0, None
        return True, metadata["nbytes"], metadata

    def get(self, from_stage: str, to_stage: str, get_key: str, metadata: Any = None) -> tuple[Any, int] | None:
        """Take a payload if it is here; None if it is not, or never will be, which is logged once.

        Raises only where that is how the engine is told to wait no longer: see `stalled.end_wait`.
        """
        end = None
        try:
            end = self._consuming.get((from_stage, to_stage)) or self._open(Edge(from_stage, to_stage), Role.CONSUMER)
            payload = end.polls.poll(get_key, metadata or self._hint)
        except Exception as error:  # raising in a poll loop is a traceback per millisecond
            self._missed(Edge(from_stage, to_stage), get_key, error, end)
            return None
        if self._outages.since_s:
            self._outages.over(Edge(from_stage, to_stage), get_key)
        return None if payload is NOT_READY else delivered(payload)

    def get_with_deadline(
        self, from_stage: str, to_stage: str, get_key: str, metadata: Any = None, *, deadline: float
    ) -> tuple[Any, int] | None:
        """Take a payload, waiting for it until `deadline` on the monotonic clock."""
        edge, end = Edge(from_stage, to_stage), None
        try:
            end = self._open(edge, Role.CONSUMER)
            payload = end.connector.get(get_key, metadata or self._hint, timeout=deadline - time.monotonic())
        except TransferTimeoutError:
            payload = NOT_READY
        except Exception as error:  # as above
            self._missed(edge, get_key, error, end)
            return None
        self._outages.over(edge, get_key)
        return None if payload is NOT_READY else delivered(payload)

    def abandon_get(self, get_key: str) -> None:
        """Stop waiting for a payload; it stays for whoever asks next."""
        for open_end in list(self._consuming.values()):
            open_end.connector.forget(get_key)

    def cleanup(self, request_id: str) -> None:
        """Discard the payload of one put key, which a later request may use again (so this is no ``cleanup`` of ours)."""
        for open_end in list(self._producing.values()):
            try:
                if open_end.connector.exists([request_id])[0]:
                    open_end.connector.fail(request_id, "the engine aborted the request")
            except OmniConnectorError as error:
                self._report("cleanup", open_end.end.edge, request_id, error)

    def reap_consumed(self) -> None:
        """Nothing to do: a payload that was read is freed as it is read."""

    def update_sender_info(self, host: str, port: int | None) -> None:
        """Where the engine thinks that the producer is: a hint for gets that bring none."""
        self._hint = None if port is None else {"source_host": host, "source_port": int(port)}

    def health(self) -> dict[str, Any]:
        """Probe every open end."""
        edges: dict[str, Any] = {}
        healthy = True
        for open_end in [*self._producing.values(), *self._consuming.values()]:
            health = open_end.connector.health()
            healthy &= health.ok
            edges[f"{open_end.end.edge} {open_end.end.role.value}"] = {
                "ok": health.ok,
                "detail": health.detail,
                **open_end.connector.stats(),
            }
        backend = backend_of(self._settings.name).name
        return {"status": "healthy" if healthy else "unhealthy", "backend": backend, "edges": edges}

    def close(self) -> None:
        """Leave the ends that this instance uses; the process' last user of one closes it."""
        if "_lost" not in self.__dict__:  # the base class' __del__ comes here after a failed __init__ too
            return
        self._lost.close()
        for ends in (self._producing, self._consuming):
            while ends:
                sharing.release(ends.popitem()[1].end)

    # ---- inside

    def _open(self, edge: Edge, role: Role) -> _Open:
        ends = self._producing if role is Role.PRODUCER else self._consuming
        with self._opening:
            end = ends.get(edge)
            if end is None:
                end = ends[edge.producer, edge.consumer] = self._make(edge, role)
        return end

    def _make(self, edge: Edge, role: Role) -> _Open:
        planned = current_deployment().edges.get(edge)
        settings = planned or self._settings
        spec = backend_of(settings.name)
        extra = split_extra(spec, settings.extra, name=settings.name)
        place = this_place()
        options = dict(extra.options)
        if role is Role.PRODUCER and _CONTROL_PORT in spec.load_options().__dataclass_fields__:
            # For names that it knows the engine puts the port itself into what it gives to a connector, not into the file.
            is_port = planned is None and settings.name in TRANSFER_ENGINE_CONNECTOR_NAMES
            port = extra.zmq_port if is_port else place.control_port(extra.zmq_port, edge, kv=self._for_kv)
            options.setdefault(_CONTROL_PORT, port)
        end = sharing.End(spec.name, edge, role, place, options)
        connector = sharing.acquire(end)
        return _Open(
            end,
            connector,
            Polls(connector, stream=settings.chunks),
            extra.readers or settings.readers,
            extra.timeout_s,
            connector.capabilities.overwrite,
        )

    def _missed(self, edge: Edge, key: str, error: Exception, end: _Open | None) -> None:
        """A payload could not be taken, now or, if the cause does not pass, ever."""
        self._report("get", edge, key, error)
        passing = isinstance(error, OmniConnectorError) and error.retryable
        if not passing or self._outages.lasting_s(edge, key) > (0.0 if end is None else end.timeout_s):
            self._give_up(edge, key, error)

    def _give_up(self, edge: Edge, key: str, error: Exception) -> None:
        self._outages.over(edge, key)
        wait = end_wait(edge, key, str(error))
        if wait is not Wait.GOES_ON and self._once.first("gave up", edge, key):
            logger.error("gave up: request=%s edge=%s key=%s fails now", _request_of(key, edge), edge, key)
        if wait is Wait.ENDS_IF_RAISED:
            raise error

    def _tell_consumers(self, edge: Edge, key: str, reason: str) -> bool:
        try:
            self._open(edge, Role.PRODUCER).connector.fail(key, reason, timeout=_TELL_TIMEOUT_S)
        except Exception as error:  # whatever it is, it is tried again
            self._report("fail", edge, key, error)
            return False
        return True

    def _report(self, operation: str, edge: Edge, key: str, error: Exception) -> None:
        if self._once.first(operation, edge, key, type(error)):
            ours = isinstance(error, OmniConnectorError)
            logger.error(
                "%s failed: request=%s edge=%s key=%s cause=%s: %s",
                operation,
                _request_of(key, edge),
                edge,
                key,
                type(error).__name__,
                error,
                exc_info=None if ours else error,
            )


def _check_settings(settings: EdgeSettings) -> None:
    """Find now what would otherwise fail at a request."""
    spec = backend_of(settings.name)
    split_extra(spec, settings.extra, name=settings.name)
    if not spec.capabilities.cross_process:
        raise ConfigError("the stages of a pipeline are processes, which it cannot connect", backend=spec.name)
    spec.load_transport()


def _request_of(key: str, edge: Edge) -> str:
    """The request in a key of the engine's, for people to read."""
    marker = f"_{edge.producer}_"
    head, found, _ = key.rpartition(marker)
    return head if found else key.removeprefix(f"omni_{edge.producer}_to_{edge.consumer}_kv_cache_")

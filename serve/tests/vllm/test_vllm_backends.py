# SPDX-License-Identifier: Apache-2.0
"""Every installed backend that reaches other hosts, with its real services, under `vllm serve --omni`.

A server takes its time to start, so each carries two backends: one on each edge of the three-stage pipeline.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from omni_server import AUDIO, FORKED, ONE_PROCESS_A_STAGE, Server, wait_until

from omni_connector_core import plugin_manager
from omni_connector_core.services import Service

# Daemons and stages share two cores: what is slow for a few seconds is not lost.
PATIENCE_S = 10.0
# The second stage stops before it has read all chunks of the first: what it leaves is freed by its time to live.
TTL_S = 20
# SDKs that do not bear others beside them in a process (see make_env.sh).
APART = Path(sys.prefix) / "apart"
_ALWAYS = frozenset({"puts", "gets", "put_bytes", "get_bytes", "pending", "bytes_held", "expired"})


def reachable() -> list[str]:
    """The installed backends that reach other hosts and whose SDK is there."""
    specs = [plugin_manager.spec(name) for name in plugin_manager.names()]
    return [spec.name for spec in specs if spec.capabilities.cross_host and spec.sdk_present()]


HERE = reachable()
sys.path.append(str(APART))
BACKENDS = sorted(reachable(), key=lambda name: name in HERE)  # those with an SDK apart first
# Two by two; one that is left over carries both edges.
PAIRS = list(itertools.zip_longest(BACKENDS[::2], BACKENDS[1::2], fillvalue=BACKENDS[-1] if BACKENDS else ""))


@dataclass(frozen=True)
class Carrier:
    """A backend, with the daemons that it needs."""

    backend: str
    service: Service | None

    @property
    def connector(self) -> dict[str, Any]:
        """Its entry in a deploy file."""
        options = {} if self.service is None else self.service.config()
        return {"name": self.backend, "extra": {"timeout_s": PATIENCE_S, "ttl_s": TTL_S, **options}}


@pytest.fixture(scope="module", params=PAIRS, ids="+".join)
def carriers(request: pytest.FixtureRequest) -> Iterator[dict[str, Carrier]]:
    """Which backend carries which edge; one service for both edges where they have the same."""
    with contextlib.ExitStack() as running:
        services: dict[str, Service | None] = {}
        for backend in dict.fromkeys(request.param):
            start = plugin_manager.spec(backend).load_service()
            services[backend] = None if start is None else running.enter_context(start())
        yield {
            edge: Carrier(backend, services[backend])
            for edge, backend in zip(("0->1", "1->2"), request.param, strict=True)
        }


@contextlib.contextmanager
def three_stages(serve: Callable[..., Any], carriers: dict[str, Carrier], *, async_chunk: bool) -> Iterator[Server]:
    """Serve the three-stage pipeline over the two backends."""
    first, second = carriers.values()
    changes = {
        "async_chunk": async_chunk,
        "connectors.edge": first.connector,
        "connectors.other": second.connector,
        "stages.1.output_connectors": {"to_stage_2": "other"},
        "stages.2.input_connectors": {"from_stage_1": "other"},
    }
    # What is apart is to be imported before the rest of a stage, as vllm-omni does, or it crashes: it cannot be forked.
    apart = any(carrier.backend not in HERE for carrier in carriers.values())
    start = {"PYTHONPATH": str(APART)} if apart else FORKED
    with serve("three", changes, environment={**ONE_PROCESS_A_STAGE, **start}) as server:
        yield server


def assert_carries(server: Server, edges: dict[str, str], audio: str) -> None:
    """The audio is right, and no transfer failed, not even one that was tried again."""
    server.assert_serves(audio, edges)
    for edge, backend in edges.items():
        for role in ("producer", "consumer"):
            counters = server.stats(backend, edge, role)
            assert {name: count for name, count in counters.items() if name not in _ALWAYS} == {}


@pytest.mark.parametrize(
    ("async_chunk", "audio"),
    [pytest.param(False, "three", id="full payload"), pytest.param(True, "three chunks", id="chunks")],
)
def test_serves_and_outlives_its_services(
    serve: Callable[..., Any], carriers: dict[str, Carrier], async_chunk: bool, audio: str
) -> None:
    edges = {edge: carrier.backend for edge, carrier in carriers.items()}
    with three_stages(serve, carriers, async_chunk=async_chunk) as server:
        assert_carries(server, edges, audio)
        for service in {carrier.service for carrier in carriers.values()} - {None}:
            assert service is not None
            for daemon in service.daemons.values():
                daemon.kill()
            reply = server.chat("hello 0")
            assert reply.status == HTTPStatus.INTERNAL_SERVER_ERROR
            assert reply.seconds < 6 * PATIENCE_S
            for name in list(service.daemons):
                service.restart(name)
            wait_until(lambda: server.chat("hello 1").sha256 == AUDIO[audio][1], 120, "it does not serve again")
        for edge, backend in edges.items():
            server.assert_memory_returns(edge, backend)

# SPDX-License-Identifier: Apache-2.0
"""Every installed backend that reaches other hosts, with its real services, under `vllm serve --omni`.

A server takes its time to start, so each carries two backends: one on each edge of the three-stage pipeline.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from omni_server import ONE_PROCESS_A_STAGE, Server, wait_until

from omni_connector_core import plugin_manager

Pair = tuple[str, str]


def pairs() -> list[Pair]:
    """The installed backends, two by two; one that is left over carries both edges."""
    specs = [plugin_manager.spec(name) for name in plugin_manager.names()]
    names = [spec.name for spec in specs if spec.capabilities.cross_host and spec.sdk_present()]
    return list(itertools.zip_longest(names[::2], names[1::2], fillvalue=names[-1] if names else ""))


@contextlib.contextmanager
def service_of(backend: str) -> Iterator[dict[str, Any]]:
    """The options of a backend, with the daemons that it needs running."""
    start = plugin_manager.spec(backend).load_service()
    if start is None:
        yield {}
    else:
        with start() as service:
            yield dict(service.config())


@pytest.fixture(scope="module", params=pairs(), ids="+".join)
def connectors(request: pytest.FixtureRequest) -> Iterator[tuple[Pair, dict[str, Any]]]:
    """Two backends, and the changes to the three-stage deploy file that put one on each edge."""
    first, second = request.param
    with service_of(first) as first_options, service_of(second) as second_options:
        changes = {
            "connectors.edge": {"name": first, "extra": first_options},
            "connectors.other": {"name": second, "extra": second_options},
            "stages.1.output_connectors": {"to_stage_2": "other"},
            "stages.2.input_connectors": {"from_stage_1": "other"},
        }
        yield (first, second), changes


@pytest.mark.parametrize(("audio", "async_chunk"), [("three", False), ("three chunks", True)], ids=["full", "chunks"])
def test_two_backends_in_one_pipeline(
    serve: Callable[..., Any], connectors: tuple[Pair, dict[str, Any]], audio: str, async_chunk: bool
) -> None:
    (first, second), changes = connectors
    with serve("three", {**changes, "async_chunk": async_chunk}, environment=ONE_PROCESS_A_STAGE) as server:
        edges = {"0->1": first, "1->2": second}
        server.assert_serves(audio, edges)
        for edge, backend in edges.items():
            server.assert_memory_returns(edge, backend)
        assert_no_failures(server, edges)


def assert_no_failures(server: Server, edges: dict[str, str]) -> None:
    """No transfer failed on the way, not even one that was tried again."""
    known = {"puts", "gets", "put_bytes", "get_bytes", "pending", "bytes_held", "expired"}
    for edge, backend in edges.items():
        for role in ("producer", "consumer"):
            wait_until(lambda end=(backend, edge, role): bool(server.stats(*end)), 10, "no counters")
            counters = server.stats(backend, edge, role)
            assert not counters["expired"]
            assert {name: count for name, count in counters.items() if name not in known} == {}

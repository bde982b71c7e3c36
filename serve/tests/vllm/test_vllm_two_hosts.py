# SPDX-License-Identifier: Apache-2.0
"""Head and headless on two machines: network namespaces, each with its own address, processes and shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from omni_server import ONE_PROCESS_A_STAGE

from omni_connector_contract_tests.harness.two_hosts import ADDRESS, TwoHosts, why_not

# Each takes one edge, from host to host and back, and is told no more of the hosts than in docs/vllm_omni.md.
CHANGES = {
    "connectors.edge": {"name": "mooncake_te", "extra": {"host": "auto"}},
    "connectors.other": {"name": "nixl", "extra": {"host": "auto"}},
    "stages.1.output_connectors": {"to_stage_2": "other"},
    "stages.2.input_connectors": {"from_stage_1": "other"},
}
EDGES = {"0->1": "mooncake_te", "1->2": "nixl"}


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    for module in ("mooncake", "nixl"):
        pytest.importorskip(module)
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with TwoHosts() as hosts:
        for host in ADDRESS:
            hosts.run(host, "ip", "route", "add", "default", "dev", "eth0")
        yield hosts


def test_head_on_one_host_and_headless_stages_on_both(serve: Callable[..., Any], hosts: TwoHosts) -> None:
    with serve("three", CHANGES, environment=ONE_PROCESS_A_STAGE, headless=[1, 2], hosts=hosts) as server:
        server.assert_serves("three", EDGES)
        for edge, backend in EDGES.items():
            server.assert_memory_returns(edge, backend)
    for host in ADDRESS:
        assert hosts.run(host, "ls", "/dev/shm") == ""

# SPDX-License-Identifier: Apache-2.0
"""Tensor, pipeline and sequence parallel stages, and KV caches between them, over shared memory.

The outputs equal those of single processes. Replicas and chunks between tensor parallel stages: test_vllm_serving.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from omni_server import AUDIO, ONE_PROCESS_A_STAGE, READY_TIMEOUT_S, Process, stats_of, wait_until, write_deploy


def test_tensor_parallel_to_pipeline_parallel_to_one(serve: Callable[..., Any]) -> None:
    """Of the first stage's two ranks one puts; both of the second stage's poll for each payload, and each gets it."""
    changes = {
        "stages.0.tensor_parallel_size": 2,
        "stages.0.devices": "2,3",
        "stages.1.engine_extras.pipeline_parallel_size": 2,
        "stages.1.devices": "4,5",
    }
    with serve("three", changes, environment=ONE_PROCESS_A_STAGE) as server:
        for _ in range(3):
            server.assert_serves("three", {"0->1": "shared_memory", "1->2": "shared_memory"})
        puts = server.stats("shared_memory", "0->1", "producer")["puts"]
        wait_until(
            lambda: server.stats("shared_memory", "0->1", "consumer")["gets"] == 2 * puts, 10, "not each rank got each"
        )
        for edge in ("0->1", "1->2"):
            server.assert_memory_returns(edge, "shared_memory")


# A cache of 160 tokens fits; the engine's own patience with one that does not come is 30 seconds.
ROOM = {"connectors.edge.extra": {"capacity_bytes": "160KiB"}}
TOO_LONG = "x" * 300


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="one-to-one"),
        pytest.param(
            {
                "stages.0.tensor_parallel_size": 2,
                "stages.0.devices": "2,3",
                "stages.1.ulysses_degree": 2,
                "stages.1.devices": "4,5",
            },
            id="tp2-to-ulysses2",
        ),
    ],
)
def test_kv_cache_to_a_diffusion_stage(model: Path, tmp_path: Path, changes: Mapping[str, Any]) -> None:
    """One that cannot be sent fails its request, on each rank of the stage (the Python API stops the engine then)."""
    deploy = write_deploy(tmp_path / "deploy.yaml", "kv", {**changes, **ROOM})
    environment = {"OMNI_CONNECTOR_STATS_INTERVAL_S": "0.1", "OMNI_CONNECTOR_DEPLOY_CONFIG": str(deploy)}
    command = [sys.executable, str(Path(__file__).parent / "kv_client.py"), str(deploy), str(model)]
    client = Process([*command, "hello 0", "hello 1", TOO_LONG], environment, tmp_path / "client.log")
    try:
        status = client.wait(READY_TIMEOUT_S)
    finally:
        left_behind = client.join(client.terminate())
    lines = client.lines()
    assert status == 0, "\n".join(lines[-60:])
    assert left_behind == []
    *served, failed = (json.loads(line) for line in lines if line.startswith('{"prompt"'))
    assert [reply.get("sha256") for reply in served] == list(AUDIO["kv"])
    assert "the KV cache of request" in failed["error"]
    assert failed["seconds"] < 20
    assert [line for line in lines if "put failed: request=" in line and "cause=PayloadTooLargeError" in line]
    produced, consumed = (stats_of(lines, "shared_memory", "0->1", role) for role in ("producer", "consumer"))
    # a payload and a KV cache (or a shard for each sending rank) for each request
    assert produced["puts"] == consumed["gets"] >= 5
    assert not [line for line in lines if "Created connector: SharedMemoryConnector" in line]

# SPDX-License-Identifier: Apache-2.0
"""Tensor, pipeline and sequence parallel stages, and KV caches between them, over shared memory.

The outputs equal those of single processes. Replicas and chunks between tensor parallel stages: test_vllm_serving.py.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omni_server import (
    AUDIO,
    FORKED,
    ONE_PROCESS_A_STAGE,
    READY_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Process,
    Server,
    engine_of,
    stats_of,
    wait_until,
    write_deploy,
)


def test_tensor_parallel_to_pipeline_parallel_to_one(serve: Callable[..., Any]) -> None:
    """Of the first stage's two ranks one puts; both of the second stage's poll for each payload, and each gets it."""
    changes = {
        "stages.0.tensor_parallel_size": 2,
        "stages.0.devices": "2,3",
        "stages.1.engine_extras.pipeline_parallel_size": 2,
        "stages.1.devices": "4,5",
    }
    with serve("three", changes, environment={**ONE_PROCESS_A_STAGE, **FORKED}) as server:
        edges = {"0->1": "shared_memory", "1->2": "shared_memory"}
        for _ in range(2):
            server.assert_serves("three", edges)
        server.assert_hung_up_requests_send_nothing("three", edges)
        puts = server.stats("shared_memory", "0->1", "producer")["puts"]
        wait_until(
            lambda: server.stats("shared_memory", "0->1", "consumer")["gets"] == 2 * puts, 60, "not each rank got each"
        )
        for edge in ("0->1", "1->2"):
            server.assert_memory_returns(edge, "shared_memory")


def test_expert_parallel_behind_two_frontends(serve: Callable[..., Any], mixture_of_experts: Path) -> None:
    """Two API servers share the stages; what each asks for comes, whichever of them asks."""
    changes = {
        "pipeline": "tinyomni_moe",
        "stages.0.tensor_parallel_size": 2,
        "stages.0.enable_expert_parallel": True,
        "stages.0.devices": "2,3",
    }
    environment = {**ONE_PROCESS_A_STAGE, **FORKED, "OMNI_CPU_RIG_MOE": "1"}
    frontends = {"arguments": ["--api-server-count", "2"], "checkpoint": mixture_of_experts}
    with serve("two", changes, environment=environment, **frontends) as server:
        wait_until(lambda: len(marked(server, "Application startup complete")) == 2, READY_TIMEOUT_S, "one frontend")
        answered = "POST /v1/chat/completions HTTP/1.1. 200"
        while len(marked(server, answered)) < 2:  # the kernel deals the connections out
            server.assert_serves("experts", {"0->1": "shared_memory"})
        server.assert_memory_returns("0->1", "shared_memory")


def marked(server: Server, pattern: str) -> set[str]:
    """The processes whose log has such a line, as vllm marks them."""
    found = (re.match(rf"\((.*? pid=\d+)\).*{pattern}", line) for line in server.lines())
    return {match[1] for match in found if match}


# A cache of 160 tokens fits; the engine's own patience with one that does not come is 30 seconds.
ROOM = {"connectors.edge.extra": {"capacity_bytes": "160KiB"}}
TOO_LONG = "x" * 300


AR_TP2_TO_ULYSSES_2 = {
    "stages.0.tensor_parallel_size": 2,
    "stages.0.devices": "2,3",
    "stages.1.ulysses_degree": 2,
    "stages.1.devices": "4,5",
}
AR_TO_RING_2 = {"stages.0.devices": "2", "stages.1.ring_degree": 2, "stages.1.devices": "4,5"}


@contextlib.contextmanager
def kv_client(
    model: Path, directory: Path, changes: Mapping[str, Any], environment: Mapping[str, str]
) -> Iterator[Process]:
    """A program that serves the KV pipeline by the Python API, which stops the engine when a request fails."""
    deploy = write_deploy(directory / "deploy.yaml", "kv", {**changes, **ROOM})
    ours = {"OMNI_CONNECTOR_DEPLOY_CONFIG": str(deploy)}
    command = [sys.executable, str(Path(__file__).parent / "kv_client.py"), str(deploy), str(model)]
    client = Process(command, {**ours, **FORKED, **environment}, directory / "client.log")
    try:
        client.wait_for('{"ready"', READY_TIMEOUT_S)
        yield client
        client.say_no_more()
        assert client.wait(STOP_TIMEOUT_S) == 0, "\n".join(client.lines()[-60:])
    finally:
        left_behind = client.join(client.terminate())
    assert left_behind == []
    assert not [line for line in client.lines() if "Created connector: SharedMemoryConnector" in line]


def audio_of(client: Process, text: str) -> str:
    """Send a prompt; the hash of its audio."""
    client.say(text)
    return json.loads(client.wait_for(f'{{"prompt": "{text}".*', 120)[0])["sha256"]


def failure_of(client: Process) -> dict[str, Any]:
    """What became of a request that fails."""
    return json.loads(client.wait_for(r'\{"prompt": .*"error".*', 60)[0])


def test_kv_cache_of_two_ranks_to_two_ranks(model: Path, tmp_path: Path) -> None:
    """One that cannot be sent fails its request, on each rank of the stage."""
    with kv_client(model, tmp_path, AR_TP2_TO_ULYSSES_2, {}) as client:
        assert [audio_of(client, f"hello {number}") for number in range(2)] == list(AUDIO["kv"])
        client.say(TOO_LONG)
        failed = failure_of(client)
        assert "the KV cache of request" in failed["error"]
        assert failed["seconds"] < 20
    lines = client.lines()
    assert [line for line in lines if "put failed: request=" in line and "cause=PayloadTooLargeError" in line]
    produced, consumed = (stats_of(lines, "shared_memory", "0->1", role) for role in ("producer", "consumer"))
    # a payload and a shard of each sending rank for each request, and a payload of the one that failed
    assert produced["puts"] == consumed["gets"] >= 7


def test_kv_cache_of_a_stage_that_is_killed(model: Path, tmp_path: Path) -> None:
    """The request fails at once on each rank of a ring, whether its payloads were put already or not: they take none."""
    with kv_client(model, tmp_path, AR_TO_RING_2, ONE_PROCESS_A_STAGE) as client:
        assert [audio_of(client, f"hello {number}") for number in range(2)] == list(AUDIO["kv"])
        ring = [process for process in client.tree() if "DiffusionWorker" in process.name()]
        assert len(ring) == 2
        for rank in ring:
            rank.suspend()
        client.say("hello 2")
        wait_until(
            lambda: stats_of(client.lines(), "shared_memory", "0->1", "producer")["puts"] > 4, 60, "nothing is put"
        )
        engine_of(client, 0).kill()
        for rank in ring:
            rank.resume()
        failed = failure_of(client)
        assert "EngineDead" in failed["error"]
        assert failed["seconds"] < 20

# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --omni` over shared memory: layouts, load, aborts, and stages that are killed.

Each server is started once for the tests of its class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

import pytest
from omni_server import AUDIO, ONE_PROCESS_A_STAGE, Reply, Server, wait_until

LONG = {
    "stages.0.default_sampling_params.max_tokens": 400,
    "stages.0.max_model_len": 1024,
    "stages.1.max_model_len": 2048,
}
OURS = {"0->1": "shared_memory"}
Serve = Callable[..., Any]


def chat_while(server: Server, requests: int, what: Callable[[], None], after_puts: int = 1) -> list[Reply]:
    """Do something in the middle of requests: when the connector has moved on by some puts."""
    before = server.stats("shared_memory", "0->1", "producer")["puts"]
    with ThreadPoolExecutor(requests) as pool:
        replies: list[Future[Reply]] = [pool.submit(server.chat, f"hello {n}") for n in range(requests)]
        wait_until(
            lambda: server.stats("shared_memory", "0->1", "producer")["puts"] >= before + after_puts, 30, "no put"
        )
        what()
        return [reply.result() for reply in replies]


def kill_stage(server: Server, stage: int) -> None:
    """Kill the engine process of a stage, as the kernel does when memory is short."""
    [victim] = [process for process in server.tree() if f"stage{stage}_replica0" in process.name()]
    victim.kill()


class TestFullPayload:
    """One process a stage; full payloads."""

    @pytest.fixture(scope="class")
    def server(self, serve: Serve) -> Iterator[Server]:
        with serve("two", environment=ONE_PROCESS_A_STAGE) as server:
            yield server

    def test_audio(self, server: Server) -> None:
        server.assert_serves("two", OURS)

    def test_sixteen_at_once_five_times(self, server: Server) -> None:
        with ThreadPoolExecutor(16) as pool:
            for _ in range(5):
                replies = list(pool.map(server.chat, [f"hello {number % 2}" for number in range(16)]))
                assert {reply.status for reply in replies} == {HTTPStatus.OK}
                assert [reply.sha256 for reply in replies] == [AUDIO["two"][number % 2] for number in range(16)]
        server.assert_memory_returns("0->1", "shared_memory")

    def test_clients_that_hang_up(self, server: Server) -> None:
        for number in range(8):
            with server.request(f"hello {number}"):
                pass
        server.assert_serves("two", OURS)
        server.assert_memory_returns("0->1", "shared_memory")


class TestThreeStagesOfChunks:
    """One process a stage; async chunks through three stages; a connector with little room."""

    @pytest.fixture(scope="class")
    def server(self, serve: Serve) -> Iterator[Server]:
        # The second stage stops before it has read all chunks of the first: what it leaves is freed by its time to live.
        changes = {"async_chunk": True, "connectors.edge.extra": {"capacity_bytes": "64KiB", "ttl_s": 5}}
        with serve("three", changes, environment=ONE_PROCESS_A_STAGE) as server:
            yield server

    def test_audio(self, server: Server) -> None:
        server.assert_serves("three chunks", {"0->1": "shared_memory", "1->2": "shared_memory"})

    def test_what_cannot_be_sent_fails_its_request_alone_and_at_once(self, server: Server) -> None:
        with ThreadPoolExecutor(2) as pool:
            too_long, other = pool.map(server.chat, ["x" * 400, "hello 0"])
        assert too_long.status == HTTPStatus.INTERNAL_SERVER_ERROR
        assert too_long.seconds < 30
        assert other.sha256 == AUDIO["three chunks"][0]
        [put] = [line for line in server.lines() if "put failed: request=" in line]
        assert "edge=0->1" in put
        assert "cause=PayloadTooLargeError" in put
        server.assert_memory_returns("0->1", "shared_memory")


class TestChunksDropIn:
    """The process layout of a GPU machine, async chunks, and the built-in connector's name in the deploy file."""

    @pytest.fixture(scope="class")
    def server(self, serve: Serve) -> Iterator[Server]:
        changes = {
            "async_chunk": True,
            "connectors.edge": {
                "name": "SharedMemoryConnector",
                "extra": {"codec_streaming": True, "connector_get_sleep_s": 0.01, "codec_chunk_frames": 25},
            },
            **LONG,
        }
        with serve("two", changes, environment={"OMNI_CONNECTOR_DROP_IN": "1"}, killed=True) as server:
            yield server

    def test_it_is_ours_that_moves_the_chunks(self, server: Server) -> None:
        first = server.chat("hello 0")
        assert first.status == HTTPStatus.OK
        assert server.chat("hello 0").sha256 == first.sha256
        wait_until(
            lambda: server.stats("shared_memory", "0->1", "consumer")["gets"] >= 200, 10, "the counters do not move"
        )

    def test_clients_that_hang_up_in_the_middle(self, server: Server) -> None:
        expected = server.chat("hello 1").sha256
        for number in range(4):
            before = server.stats("shared_memory", "0->1", "producer")["puts"]
            with server.request(f"hello {number}"):
                wait_until(
                    lambda least=before + 3: server.stats("shared_memory", "0->1", "producer")["puts"] >= least,
                    30,
                    "no chunk",
                )
        assert server.chat("hello 1").sha256 == expected
        server.assert_memory_returns("0->1", "shared_memory")

    def test_a_killed_consumer_fails_its_requests_at_once(self, server: Server) -> None:
        replies = chat_while(server, 3, lambda: kill_stage(server, 1), after_puts=10)
        assert {reply.status for reply in replies} == {HTTPStatus.INTERNAL_SERVER_ERROR}
        assert max(reply.seconds for reply in replies) < 30
        assert server.health() == HTTPStatus.SERVICE_UNAVAILABLE
        assert server.chat("hello 0").status == HTTPStatus.INTERNAL_SERVER_ERROR
        server.assert_memory_returns("0->1", "shared_memory")


class TestHeadAndHeadless:
    """Two `vllm serve` processes, one a stage."""

    @pytest.fixture(scope="class")
    def server(self, serve: Serve) -> Iterator[Server]:
        # vLLM-Omni itself kills a headless stage's engine, whatever the connector: its socket stays for the next to remove.
        with serve("two", environment=ONE_PROCESS_A_STAGE, headless=[1], killed=True) as server:
            yield server

    def test_audio(self, server: Server) -> None:
        server.assert_serves("two", OURS)
        server.assert_memory_returns("0->1", "shared_memory")

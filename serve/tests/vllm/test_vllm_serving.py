# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --omni` over shared memory: layouts, load, aborts, and what fails.

A server takes its time to start: each is started once for the tests of its class, and is as varied as one server can be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

import psutil
import pytest
from omni_server import AUDIO, FORKED, ONE_PROCESS_A_STAGE, Reply, Server, engine_of, engines_of, wait_until

OURS = {"0->1": "shared_memory"}
TWO_DEVICES_EACH = {"stages.0.devices": "2,3", "stages.1.devices": "4,5"}
ROOM_FOR_LONG = {"stages.0.max_model_len": 1024, "stages.1.max_model_len": 2048}
LONG = 400  # tokens: some hundred chunks
Serve = Callable[..., Any]


def puts_of(server: Server) -> int:
    """How many payloads the first stage has put."""
    return server.stats("shared_memory", "0->1", "producer")["puts"]


def wait_for_puts(server: Server, puts: int) -> None:
    """Wait until the first stage has put that many."""
    wait_until(lambda: puts_of(server) >= puts, 60, "the first stage puts no more")


def failed_puts(server: Server) -> list[str]:
    """The log lines of puts that failed, when there is one: an answer may be read before the log."""
    server.head.wait_for("put failed: request=", 60)
    return [line for line in server.lines() if "put failed: request=" in line]


@contextlib.contextmanager
def frozen(engines: list[psutil.Process]) -> Iterator[None]:
    """Stop engines, so that no request gets past them; they go on at the end, those that are not killed by then."""
    for engine in engines:
        engine.suspend()
    try:
        yield
    finally:
        for engine in engines:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.resume()


def answers_of_four_when_killed(server: Server, stage: int, *, replica: int = 0) -> list[Reply]:
    """Kill a stage while the first one is at work: in the middle of a request, with four more that it has not ended."""
    killed = engine_of(server, stage, replica)
    with ThreadPoolExecutor(4) as pool:
        with server.held(), frozen(engines_of(server, 0)):
            replies = [pool.submit(server.chat, f"hello {number}") for number in range(4)]
            killed.kill()
            server.head.wait_for(f"Stage-{stage} replica-{replica} is dead", 60)
        return [reply.result() for reply in replies]


@contextlib.contextmanager
def frozen_in_the_middle_of_chunks(server: Server) -> Iterator[tuple[psutil.Process, list[Future[Reply]]]]:
    """Stop the second stage, so that no request can come to its end, and wait until the first is at work on three; yields both."""
    before = puts_of(server)
    consumer = engine_of(server, 1)
    with ThreadPoolExecutor(3) as pool, frozen([consumer]):
        replies = [pool.submit(server.chat, f"hello {number}", max_tokens=LONG) for number in range(3)]
        wait_for_puts(server, before + 10)
        yield consumer, replies


class TestFullPayload:
    """Full payloads, two replicas of each stage, one process each; a connector with little room."""

    @pytest.fixture(scope="class")
    def server(self, serve: Serve) -> Iterator[Server]:
        changes = {
            "stages.0.num_replicas": 2,
            "stages.1.num_replicas": 2,
            # What a request has sent that is aborted between two stages is freed by its time to live.
            "connectors.edge.extra": {"capacity_bytes": "128KiB", "ttl_s": 5},
            **TWO_DEVICES_EACH,
            **ROOM_FOR_LONG,
        }
        with serve("two", changes, environment={**ONE_PROCESS_A_STAGE, **FORKED}, killed=True) as server:
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
        for number in range(4):
            with server.request(f"hello {number}"):
                pass
        server.assert_serves("two", OURS)
        server.assert_memory_returns("0->1", "shared_memory")

    def test_what_a_client_hangs_up_on_is_not_sent(self, server: Server) -> None:
        server.assert_hung_up_requests_send_nothing("two", OURS)

    def test_what_cannot_be_sent_fails_its_request_alone_and_at_once(self, server: Server) -> None:
        with ThreadPoolExecutor(2) as pool:
            too_long = pool.submit(server.chat, "x" * 500, max_tokens=LONG)
            other = server.chat("hello 0")
        assert too_long.result().status == HTTPStatus.INTERNAL_SERVER_ERROR
        assert too_long.result().seconds < 60
        assert other.sha256 == AUDIO["two"][0]
        [put] = failed_puts(server)
        assert "cause=PayloadTooLargeError" in put
        server.assert_memory_returns("0->1", "shared_memory")

    def test_a_killed_consumer_leaves_the_work_to_its_replica(self, server: Server) -> None:
        replies = answers_of_four_when_killed(server, 1, replica=0)
        assert [reply.status for reply in replies] == [HTTPStatus.OK] * 4
        assert server.health() == HTTPStatus.OK
        server.assert_serves("two", OURS)
        server.assert_memory_returns("0->1", "shared_memory")

    def test_the_last_consumer_killed_fails_its_requests_at_once(self, server: Server) -> None:
        replies = answers_of_four_when_killed(server, 1, replica=1)
        assert {reply.status for reply in replies} == {HTTPStatus.INTERNAL_SERVER_ERROR}
        assert max(reply.seconds for reply in replies) < 60
        assert server.health() == HTTPStatus.SERVICE_UNAVAILABLE
        assert server.chat("hello 0").status == HTTPStatus.INTERNAL_SERVER_ERROR
        server.assert_memory_returns("0->1", "shared_memory")


class TestChunks:
    """Async chunks as on a GPU machine (an engine and its workers are processes), tensor parallel 2 -> 2.

    The connector is as in a deploy file that vllm-omni brings: ours stands in for the built-in one.
    """

    @pytest.fixture(scope="class")
    def server(self, serve: Serve) -> Iterator[Server]:
        changes = {
            "stages.0.tensor_parallel_size": 2,
            "stages.1.tensor_parallel_size": 2,
            **TWO_DEVICES_EACH,
            **ROOM_FOR_LONG,
        }
        drop_in = {"OMNI_CONNECTOR_DROP_IN": "1"}
        with serve("two", changes, upstream="qwen3_tts", environment=drop_in, killed=True) as server:
            yield server

    def test_audio(self, server: Server) -> None:
        server.assert_serves("two chunks", OURS, drop_in=True)

    def test_clients_that_hang_up_in_the_middle(self, server: Server) -> None:
        for _ in range(4):
            before = puts_of(server)
            with server.held():
                wait_for_puts(server, before + 3)
        server.assert_serves("two chunks", OURS, drop_in=True)
        server.assert_memory_returns("0->1", "shared_memory")

    def test_a_killed_consumer_fails_its_requests_at_once(self, server: Server) -> None:
        with frozen_in_the_middle_of_chunks(server) as (consumer, replies):
            consumer.kill()
            failed = [reply.result() for reply in replies]
        assert {reply.status for reply in failed} == {HTTPStatus.INTERNAL_SERVER_ERROR}
        assert max(reply.seconds for reply in failed) < 60
        assert server.health() == HTTPStatus.SERVICE_UNAVAILABLE
        assert server.chat("hello 0").status == HTTPStatus.INTERNAL_SERVER_ERROR
        server.assert_memory_returns("0->1", "shared_memory")


class TestThreeStagesOfChunks:
    """One process a stage; async chunks through three stages; a connector with little room."""

    @pytest.fixture(scope="class")
    def server(self, serve: Serve) -> Iterator[Server]:
        # The second stage stops before it has read all chunks of the first: what it leaves is freed by its time to live.
        changes = {"async_chunk": True, "connectors.edge.extra": {"capacity_bytes": "64KiB", "ttl_s": 5}}
        with serve("three", changes, environment={**ONE_PROCESS_A_STAGE, **FORKED}, killed=True) as server:
            yield server

    def test_audio(self, server: Server) -> None:
        server.assert_serves("three chunks", {"0->1": "shared_memory", "1->2": "shared_memory"})

    def test_what_cannot_be_sent_fails_its_request_alone_and_at_once(self, server: Server) -> None:
        with ThreadPoolExecutor(2) as pool:
            too_long, other = pool.map(server.chat, ["x" * 400, "hello 0"])
        assert too_long.status == HTTPStatus.INTERNAL_SERVER_ERROR
        assert too_long.seconds < 60
        assert other.sha256 == AUDIO["three chunks"][0]
        [put] = failed_puts(server)
        assert "edge=0->1" in put
        assert "cause=PayloadTooLargeError" in put
        server.assert_memory_returns("0->1", "shared_memory")

    def test_a_killed_producer_fails_its_requests_at_once(self, server: Server) -> None:
        """What it had put and the second stage had not taken goes with it."""
        with frozen_in_the_middle_of_chunks(server) as (consumer, replies):
            engine_of(server, 0).kill()
            consumer.resume()
            failed = [reply.result() for reply in replies]
        assert {reply.status for reply in failed} == {HTTPStatus.INTERNAL_SERVER_ERROR}
        assert max(reply.seconds for reply in failed) < 60
        assert server.health() == HTTPStatus.SERVICE_UNAVAILABLE
        server.assert_memory_returns("1->2", "shared_memory")


class TestHeadAndHeadless:
    """Two `vllm serve` processes, one a stage; in the end the producing stage is killed."""

    @pytest.fixture(scope="class")
    def server(self, serve: Serve) -> Iterator[Server]:
        with serve("two", ROOM_FOR_LONG, environment=ONE_PROCESS_A_STAGE, headless=[1], killed=True) as server:
            yield server

    def test_audio(self, server: Server) -> None:
        server.assert_serves("two", OURS)
        server.assert_memory_returns("0->1", "shared_memory")

    def test_a_killed_producer_fails_its_requests_at_once(self, server: Server) -> None:
        replies = answers_of_four_when_killed(server, 0)
        assert {reply.status for reply in replies} == {HTTPStatus.INTERNAL_SERVER_ERROR}
        assert max(reply.seconds for reply in replies) < 60
        assert server.health() == HTTPStatus.SERVICE_UNAVAILABLE

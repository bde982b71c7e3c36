"""Streams over the reference transport; every backend runs the suite's level 3 besides."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_connector_core import Key, OmniConnector, create_connector
from omni_connector_core.errors import (
    ClosedError,
    DecodeError,
    PeerLostError,
    ProducerFailedError,
    RequestAbandonedError,
    TransferTimeoutError,
)


@pytest.fixture
def conn(request: pytest.FixtureRequest) -> Iterator[OmniConnector]:
    with create_connector("memory", {"timeout_s": 20}, namespace=request.node.name) as connector:
        yield connector


def write_all(conn: OmniConnector, request_id: str, chunks: list[object], **options: int) -> None:
    with conn.writer(request_id, **options) as writer:
        for chunk in chunks:
            writer.write(chunk)


def test_a_stream_is_read_in_order_and_ends(conn: OmniConnector) -> None:
    chunks = [b"a", None, "", 3, {"x": [1]}, (), 0, False]
    write_all(conn, "r", list(chunks))
    assert list(conn.reader("r")) == chunks
    assert conn.stats()["pending"] == 0


def test_an_empty_stream_is_a_stream(conn: OmniConnector) -> None:
    write_all(conn, "r", [])
    assert list(conn.reader("r")) == []


def test_the_last_chunk_can_carry_the_end(conn: OmniConnector) -> None:
    writer = conn.writer("r")
    writer.write(1)
    writer.write(2, last=True)
    assert conn.stats()["puts"] == 2
    assert list(conn.reader("r")) == [1, 2]
    with pytest.raises(ClosedError):
        writer.write(3)


def test_the_reader_may_start_first_and_a_slow_reader_bounds_the_writer(conn: OmniConnector) -> None:
    most = 0
    with ThreadPoolExecutor(1) as pool:
        pool.submit(write_all, conn, "r", list(range(100)), window=4)
        for n, chunk in enumerate(conn.reader("r", window=4)):
            assert chunk == n
            most = max(most, conn.stats()["pending"])
    assert 1 <= most <= 4


def test_a_writer_without_a_reader_stops_at_its_window(conn: OmniConnector) -> None:
    writer = conn.writer("r", window=3)
    for n in range(3):
        writer.write(n)
    with pytest.raises(TransferTimeoutError, match="3 unread chunks"):
        writer.write(3, timeout=0.05)
    assert conn.stats()["pending"] == 3
    reader = conn.reader("r")
    assert [next(reader), next(reader)] == [0, 1]
    writer.write(3, last=True)
    assert list(reader) == [2, 3]


def test_a_failure_comes_after_what_was_written(conn: OmniConnector) -> None:
    with pytest.raises(RuntimeError, match="boom"), conn.writer("r") as writer:
        writer.write(1)
        raise RuntimeError("boom")
    reader = conn.reader("r")
    assert next(reader) == 1
    with pytest.raises(ProducerFailedError, match="RuntimeError: boom"):
        next(reader)
    assert list(reader) == []


def test_abandoning_a_stream_stops_its_writer_and_frees_everything(conn: OmniConnector) -> None:
    writer = conn.writer("r", window=4)
    for n in range(4):
        writer.write(n)
    with conn.reader("r") as reader:
        assert next(reader) == 0
    assert conn.stats()["pending"] == 0
    assert conn.stats()["bytes_held"] == 0
    with pytest.raises(RequestAbandonedError):
        writer.write(4)


def test_abandoning_wakes_a_writer_that_waits_for_credit(conn: OmniConnector) -> None:
    writer = conn.writer("r", window=1)
    writer.write(0)
    waiting = threading.Event()

    def write_on() -> None:
        waiting.set()
        writer.write(1)

    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(write_on)
        waiting.wait()
        conn.cleanup("r")
        with pytest.raises(RequestAbandonedError):
            blocked.result(10)


def test_a_chunk_that_is_late_can_be_asked_for_again(conn: OmniConnector) -> None:
    reader = conn.reader("r", timeout=0.01)
    with pytest.raises(TransferTimeoutError):
        next(reader)
    conn.writer("r").write("late", last=True)
    assert list(reader) == ["late"]


def test_a_payload_that_is_no_chunk_is_told_apart(conn: OmniConnector) -> None:
    conn.put("r", "whole")
    with pytest.raises(DecodeError, match="not a chunk"):
        next(conn.reader("r"))


def test_streams_of_one_request_keep_apart_by_shard(conn: OmniConnector) -> None:
    for shard in ("audio", "text"):
        with conn.writer("r", shard=shard) as writer:
            writer.write(shard)
    assert list(conn.reader("r", shard="text")) == ["text"]
    assert list(conn.reader("r", shard="audio")) == ["audio"]
    assert conn.exists([Key("r", 0, "audio"), Key("r", 0, "text")]) == [False, False]


@settings(max_examples=60, deadline=None)
@given(
    chunks=st.lists(st.binary(max_size=64), max_size=30),
    window=st.integers(1, 8),
    reader_window=st.integers(1, 8),
    last=st.booleans(),
)
def test_any_windows_deliver_exactly_once_in_order(
    chunks: list[bytes], window: int, reader_window: int, last: bool
) -> None:
    with (
        create_connector("memory", {"timeout_s": 20}, namespace="streams-property") as conn,
        ThreadPoolExecutor(1) as pool,
    ):
        request_id = f"r-{id(chunks)}-{conn.stats()['puts']}"

        def produce() -> None:
            with conn.writer(request_id, window=window) as writer:
                for n, chunk in enumerate(chunks):
                    writer.write(chunk, last=last and n == len(chunks) - 1)

        produced = pool.submit(produce)
        assert list(conn.reader(request_id, window=reader_window)) == chunks
        produced.result(10)
        assert conn.stats()["pending"] == 0


def test_a_chunk_costs_one_put_one_get_and_an_eighth_of_a_message(
    conn: OmniConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    transport = conn.transport
    for name in ("put", "get", "poll", "expect", "consumed", "exists", "forget"):
        method = getattr(transport, name)

        def counting(*args: Any, name: str = name, method: Any = method, **options: Any) -> Any:
            calls[name] += 1
            return method(*args, **options)

        monkeypatch.setattr(transport, name, counting)
    reader = conn.reader("r", window=16)
    with conn.writer("r", window=16) as writer:
        for n in range(64):
            writer.write(n)
            assert next(reader) == n
        sent = dict(calls)
    assert sent.pop("put") == sent.pop("get") == 64
    assert sent.pop("expect") <= 64 // 8 + 1
    assert sent.pop("consumed") <= 64 // 8
    assert not sent
    assert list(reader) == []
    assert calls["put"] == calls["get"] == 65


def test_a_chunk_of_another_writer_is_never_taken_for_the_next(conn: OmniConnector) -> None:
    reader = conn.reader("r")
    conn.writer("r").write("one's first")
    assert next(reader) == "one's first"
    other = conn.writer("r")
    other.write("another's first")
    other.write("another's second")
    with pytest.raises(PeerLostError, match="chunk 1 is of another writer"):
        next(reader)
    assert list(reader) == []


def test_a_writer_that_waited_for_its_reader_is_counted(conn: OmniConnector) -> None:
    writer = conn.writer("r", window=2)
    reader = conn.reader("r")
    for _ in range(2):
        writer.write(0)
    with pytest.raises(TransferTimeoutError):
        writer.write(0, timeout=0.01)
    assert conn.stats()["failures"] == {"write:TransferTimeoutError": 1}
    assert [next(reader), next(reader)] == [0, 0]
    writer.write(0, last=True)
    assert conn.stats()["credit_time"]["count"] == 1
    assert conn.stats()["credit_time"]["sum_s"] >= 0.01


def test_coroutines_stream_without_blocking_the_loop(conn: OmniConnector) -> None:
    async def produce(request_id: str) -> None:
        async with conn.aio.writer(request_id, window=2) as writer:
            for n in range(10):
                await writer.write((request_id, n))

    async def consume(request_id: str) -> list[object]:
        async with conn.aio.reader(request_id) as reader:
            return [chunk async for chunk in reader]

    async def main() -> None:
        names = [f"r{n}" for n in range(20)]
        read, _ = await asyncio.gather(
            asyncio.gather(*(consume(name) for name in names)), asyncio.gather(*(produce(name) for name in names))
        )
        assert read == [[(name, n) for n in range(10)] for name in names]

    asyncio.run(main())


def test_a_coroutines_get_can_be_cancelled_and_its_payload_stays(conn: OmniConnector) -> None:
    async def main() -> None:
        task = asyncio.create_task(conn.aio.get("r"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await conn.aio.put("r", 5)
        assert await conn.aio.get("r") == 5

    asyncio.run(main())

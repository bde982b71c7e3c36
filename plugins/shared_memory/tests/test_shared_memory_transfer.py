"""Payloads between real processes, over the public API."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from shared_memory_edge import Edge, eventually, produce

from omni_connector_core import NOT_READY, Key, OmniConnector, Producer, Role
from omni_connector_core.errors import (
    AmbiguousKeyError,
    BufferMismatchError,
    CapacityError,
    OmniConnectorError,
    PayloadExpiredError,
    PayloadTooLargeError,
    ProducerFailedError,
    RequestAbandonedError,
)
from omni_connector_core.handles import GetHandle
from omni_connector_shared_memory import consumer, server
from omni_connector_shared_memory.leader import LeaderFollowers


@pytest.fixture
def edge(tmp_path: Path) -> Edge:
    return Edge(tmp_path / "run")


def test_the_consumer_gets_what_another_process_put(edge: Edge) -> None:
    payload = {"a": np.arange(100_000, dtype=np.int32), "b": (1, "x", None)}
    with edge.peer(produce, Role.PRODUCER) as (pipe, _), edge.open(Role.CONSUMER) as conn:
        pipe.recv()
        for named in (False, True):
            pipe.send(("k", payload, {}))
            metadata = pipe.recv()
            got = conn.get("k", metadata if named else None)
            assert (got["a"] == payload["a"]).all()
            assert got["b"] == payload["b"]


def test_a_consumer_may_wait_before_the_producer_exists(edge: Edge) -> None:
    with edge.open(Role.CONSUMER) as conn:
        handle = conn.submit_get("k")
        assert not handle.done()
        with edge.peer(produce, Role.PRODUCER) as (pipe, _):
            pipe.recv()
            pipe.send(("k", b"x", {}))
            assert handle.result(20) == b"x"
            pipe.recv()


def test_a_runtime_folder_may_have_a_long_name(tmp_path: Path) -> None:
    edge = Edge(tmp_path / ("long" * 40))
    with edge.open() as conn:
        conn.put("k", 1)
        assert conn.get("k") == 1


def test_a_get_wakes_up_for_a_producer_that_comes_while_it_waits(edge: Edge) -> None:
    with edge.open(Role.CONSUMER) as consumer, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(consumer.get, "k")
        with edge.open(Role.PRODUCER, replica=3) as producer:
            producer.put("k", "late")
            assert waiting.result(20) == "late"


def holds_nothing(conn: OmniConnector) -> bool:
    return conn.transport.usage().bytes_held == 0


def test_all_that_wait_for_a_producer_get_one_read_each(tmp_path: Path) -> None:
    for _ in range(40):
        edge = Edge(tmp_path / "run")
        with ExitStack() as ends, ThreadPoolExecutor(3) as pool:
            consumers = [ends.enter_context(edge.open(Role.CONSUMER)) for _ in range(3)]
            waiting = [pool.submit(consumer.get, "k") for consumer in consumers]
            producer = ends.enter_context(edge.open(Role.PRODUCER))
            producer.put("k", "all", readers=3)
            assert [one.result(20) for one in waiting] == ["all"] * 3
            assert eventually(partial(holds_nothing, producer))


def test_a_second_producer_may_appear_while_a_get_waits(edge: Edge) -> None:
    with ExitStack() as ends, ThreadPoolExecutor(2) as pool:
        first, second = (ends.enter_context(edge.open(Role.PRODUCER, replica=n)) for n in range(2))
        consumer = ends.enter_context(edge.open(Role.CONSUMER))
        first.put("warm", 0)
        assert consumer.get("warm") == 0
        one, other = pool.submit(consumer.get, "one"), pool.submit(consumer.get, "other")
        second.put("other", 2)
        assert other.result(20) == 2
        first.put("one", 1)
        assert one.result(20) == 1
        assert first.transport.usage().pending == second.transport.usage().pending == 0


def test_one_may_wait_for_ever(edge: Edge) -> None:
    with edge.open() as conn, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(conn.get, "k", timeout=float("inf"))
        conn.put("other", 0, ttl=float("inf"), timeout=float("inf"))
        conn.put("k", 1, ttl=1e9, timeout=1e9)
        assert waiting.result(20) == 1
        assert conn.get("other") == 0


def test_a_poll_and_a_get_of_one_key_do_not_steal_from_each_other(edge: Edge) -> None:
    with edge.open() as conn:
        conn.put("warm", 0)
        assert conn.get("warm") == 0
        assert conn.poll("k") is NOT_READY
        metadata = conn.put("k", 1)
        assert conn.get("k", metadata) == 1
        assert conn.poll("k") is NOT_READY
        conn.put("k", 2)
        assert eventually(lambda: conn.poll("k") == 2)


def test_polls_ask_the_system_nothing_until_a_producer_says_something(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "LOOK_S", 3600.0)
    with edge.open(Role.PRODUCER) as producer, edge.open(Role.CONSUMER) as conn:
        producer.put("first", b"")
        assert conn.get("first") == b""
        assert conn.poll("k") is NOT_READY
        monkeypatch.setattr(LeaderFollowers, "look", None)
        news = conn.transport.news()
        assert [conn.poll("k") for _ in range(100)] == [NOT_READY] * 100
        assert conn.transport.news() == news
        producer.put("k", b"x")
        assert eventually(lambda: conn.transport.news() != news)
        assert eventually(lambda: conn.poll("k") == b"x")


def test_two_producers_that_hold_a_key_are_both_named(edge: Edge) -> None:
    with (
        edge.open(Role.PRODUCER) as first,
        edge.open(Role.PRODUCER, replica=1) as second,
        edge.open(Role.CONSUMER) as consumer,
    ):
        first.put("k", 1)
        metadata = second.put("k", 2)
        with pytest.raises(AmbiguousKeyError, match=r"replica 0 rank 0 .* and by replica 1 rank 0"):
            consumer.get("k")
        assert consumer.get("k", metadata) == 2
        assert consumer.get("k", producer=Producer(0, 0)) == 1


def test_threads_share_one_connector(edge: Edge) -> None:
    count = 50

    def put(lane: int) -> None:
        for n in range(count):
            producer.put(Key(f"r{lane}", n), {"n": (lane, n), "x": np.full(1000, lane * count + n)})

    def get(lane: int) -> None:
        for n in range(count):
            got = consumer.get(Key(f"r{lane}", n))
            assert got["n"] == (lane, n)
            assert (got["x"] == lane * count + n).all()

    with edge.open(Role.PRODUCER) as producer, edge.open(Role.CONSUMER) as consumer, ThreadPoolExecutor(16) as pool:
        work = [pool.submit(step, lane) for lane in range(8) for step in (get, put)]
        for one in work:
            one.result(60)
        assert producer.stats()["puts"] == consumer.stats()["gets"] == 8 * count


def test_many_threads_that_want_one_key_get_one_read_each(edge: Edge) -> None:
    with edge.open() as conn, ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(conn.get, "k") for _ in range(8)]
        for n in range(8):
            conn.put("k", n, timeout=20)
            assert eventually(lambda n=n: sum(one.done() for one in waiting) == n + 1)
        assert sorted(one.result() for one in waiting) == list(range(8))


@pytest.mark.parametrize("nbytes", [1000, 3 << 20])
def test_readers_of_one_payload_cannot_disturb_each_other(edge: Edge, nbytes: int) -> None:
    with edge.open(Role.PRODUCER) as producer, edge.open(Role.CONSUMER) as one, edge.open(Role.CONSUMER) as other:
        producer.put("k", np.ones(nbytes, np.uint8), readers=2)
        first, second = one.get("k"), other.get("k")
        if first.flags.writeable:
            first[:] = 7
        assert (second == 1).all()
        del first, second
        gc.collect()
        assert eventually(lambda: producer.transport.usage().bytes_held == 0)


def test_memory_is_used_again_and_again(edge: Edge) -> None:
    with edge.open(Role.PRODUCER, {"capacity_bytes": "4MiB"}) as producer, edge.open(Role.CONSUMER) as consumer:
        for n in range(200):
            producer.put("k", np.full(1 << 20, n, np.uint8), timeout=10)
            assert (consumer.get("k") == n).all()
        assert producer.transport.usage().bytes_held == 0


def test_a_put_waits_for_room_and_wakes_up_when_a_view_goes(edge: Edge) -> None:
    with edge.open(Role.PRODUCER, {"capacity_bytes": "2MiB"}) as producer, edge.open(Role.CONSUMER) as consumer:
        producer.put("a", np.zeros(1_500_000, np.uint8))
        view = consumer.get("a")
        with pytest.raises(CapacityError):
            producer.put("b", np.zeros(1_500_000, np.uint8), timeout=0.05)
        with pytest.raises(PayloadTooLargeError):
            producer.put("b", np.zeros(3_000_000, np.uint8))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(producer.put, "b", np.ones(1_500_000, np.uint8))
            assert not view.any()
            del view
            waiting.result(20)
        assert consumer.get("b").all()


def test_get_into_leaves_a_payload_that_does_not_fit(edge: Edge) -> None:
    with edge.open() as conn:
        conn.put("k", np.arange(1000, dtype=np.uint8))
        with pytest.raises(BufferMismatchError):
            conn.get_into("k", [bytearray(999)])
        target = bytearray(1000)
        assert conn.get_into("k", [memoryview(target)[:300], memoryview(target)[300:]]) == 1000
        assert bytes(target) == np.arange(1000, dtype=np.uint8).tobytes()
        assert eventually(lambda: conn.transport.usage().bytes_held == 0)


@pytest.fixture
def promised(edge: Edge) -> Iterator[tuple[OmniConnector, OmniConnector, GetHandle]]:
    """A producer, a consumer, and the consumer's handle on a payload that was sent to it, but that it has not looked at."""
    with edge.open(Role.PRODUCER) as producer, edge.open(Role.CONSUMER) as consumer:
        producer.put("warm", 0)
        assert consumer.get("warm") == 0
        handle = consumer.submit_get("k")
        assert not handle.done()
        producer.put("k", np.ones(100_000), ttl=0.5)
        assert producer.exists(["k"]) == [False]
        yield producer, consumer, handle


Promised = tuple[OmniConnector, OmniConnector, GetHandle]


def test_what_was_promised_and_never_taken_expires(promised: Promised) -> None:
    producer, _, handle = promised
    assert eventually(lambda: producer.transport.usage().expired == 1)
    assert producer.transport.usage().bytes_held == 0
    with pytest.raises(PayloadExpiredError):
        handle.result()
    assert producer.put("k", 2)
    assert handle.cancel() is None


def test_what_was_promised_and_never_taken_can_be_cleaned_up(promised: Promised) -> None:
    producer, _, handle = promised
    assert producer.cleanup("k") == 1
    assert producer.transport.usage().bytes_held == 0
    with pytest.raises(RequestAbandonedError):
        handle.result()


def test_what_was_promised_and_never_taken_can_fail(promised: Promised) -> None:
    producer, _, handle = promised
    producer.fail("k", "on second thoughts")
    with pytest.raises(ProducerFailedError, match="on second thoughts"):
        handle.result()


def test_what_was_promised_and_never_taken_can_be_overwritten(promised: Promised) -> None:
    producer, consumer, handle = promised
    producer.put("k", "new", overwrite=True)
    assert handle.result() == "new"
    for n in range(100):  # tickets are used again
        producer.put("k", n)
        assert consumer.get("k") == n


@pytest.mark.parametrize("end", ["cleanup", "fail", "overwrite"])
def test_what_is_given_back_while_it_is_recalled_comes_to_nobody(
    promised: Promised, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The consumer sees the mark, gives the payload back and asks again, all before the producer looks what came of it."""
    producer, _, handle = promised

    def look(_seconds: float) -> None:
        with contextlib.suppress(OmniConnectorError):
            handle.done()

    monkeypatch.setattr(server, "time", SimpleNamespace(sleep=look, monotonic=time.monotonic))
    if end == "cleanup":
        producer.cleanup("k")
    elif end == "fail":
        producer.fail("k", "on second thoughts")
    else:
        producer.put("k", np.full(100_000, 2.0), overwrite=True)
    producer.put("other", np.zeros(100_000))  # where the other lay, if that is free
    errors = {"cleanup": RequestAbandonedError, "fail": ProducerFailedError}
    if end in errors:
        with pytest.raises(errors[end]):
            handle.result()
    else:
        assert (handle.result() == 2).all()


def test_what_was_taken_in_time_is_not_recalled(promised: Promised) -> None:
    producer, _, handle = promised
    view = handle.result()
    assert producer.cleanup("k") == 0
    assert view.all()
    assert producer.transport.usage().bytes_held >= view.nbytes


def test_views_stay_valid_when_everything_else_is_gone(edge: Edge) -> None:
    with edge.peer(produce, Role.PRODUCER) as (pipe, process), edge.open(Role.CONSUMER) as conn:
        pipe.recv()
        for key in ("a", "b"):
            pipe.send((key, np.full(1 << 20, 5, np.uint8), {}))
            pipe.recv()
        view = conn.get("a")
        handle = conn.submit_get("b")
        assert eventually(handle.done)
        process.kill()
        process.join()
        conn.close()
        other = handle.result()
        assert (view == 5).all()
        assert (other == 5).all()


def test_a_held_view_keeps_its_memory_after_the_consumer_closed(edge: Edge) -> None:
    with edge.open(Role.PRODUCER) as producer:
        with edge.open(Role.CONSUMER) as consumer:
            producer.put("k", np.full(100_000, 9, np.uint8))
            view = consumer.get("k")
        del consumer
        gc.collect()
        for n in range(50):
            producer.put(f"other{n}", np.zeros(100_000, np.uint8))
        assert (view == 9).all()
        held = producer.transport.usage().bytes_held
        del view
        gc.collect()
        assert eventually(lambda: producer.transport.usage().bytes_held <= held - 100_000)


def wait_for_stop(conn: OmniConnector, pipe: Connection) -> None:
    conn.put("k", 1)
    pipe.send([thread.name for thread in threading.enumerate()])
    pipe.recv()


def test_an_end_has_one_thread_at_most(edge: Edge) -> None:
    before = threading.active_count()
    with edge.peer(wait_for_stop, Role.PRODUCER) as (pipe, _), edge.open(Role.CONSUMER) as conn:
        assert conn.get("k") == 1
        assert threading.active_count() == before
        assert pipe.recv() == ["MainThread", "omni-connector-shared-memory"]
        pipe.send("stop")


def test_a_poll_that_takes_in_what_a_waiting_get_is_sent_wakes_it(edge: Edge) -> None:
    with edge.peer(produce, Role.PRODUCER) as (pipe, _), edge.open(Role.CONSUMER) as conn:
        pipe.recv()
        done = threading.Event()

        def poll() -> None:
            while not done.wait(1e-4):
                assert conn.poll("never") is NOT_READY

        polling = threading.Thread(target=poll)
        polling.start()
        try:
            with ThreadPoolExecutor(1) as pool:
                for n in range(200):
                    waiting = pool.submit(conn.get, f"k{n}", timeout=60)
                    pipe.send((f"k{n}", n, {}))
                    pipe.recv()
                    assert waiting.result(20) == n
        finally:
            done.set()
            polling.join()

"""SIGKILL, at every step: nothing hangs, nothing is delivered wrong, nothing is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from shared_memory_edge import Edge, eventually, produce

from omni_connector_core import Key, OmniConnector, Role, create_connector
from omni_connector_core.errors import ForkedError, PeerLostError, TransferTimeoutError

# children are forked from a server that has imported everything, so that hundreds of them may die
nursery = multiprocessing.get_context("forkserver")
nursery.set_forkserver_preload(["omni_connector_shared_memory.transport", "omni_connector_core.codec", "numpy"])
PAYLOAD = np.arange(300_000, dtype=np.uint8)
STRIDE = int(os.environ.get("CRASH_STRIDE", "23"))
"""Every how many lines of our code a process is killed; 1 kills it at each."""


@pytest.fixture
def edge(tmp_path: Path) -> Edge:
    return Edge(tmp_path / "run")


def die_at_line(number: int) -> None:
    """Kill this process when it comes to a line of the package, whichever thread does."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if "omni_connector_shared_memory" not in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


def put_and_die(opening: dict[str, Any], number: int) -> None:
    die_at_line(number)
    with create_connector("shared_memory", **opening) as conn:
        conn.put("k", PAYLOAD)
        assert conn.transport.consumed(Key("k"), deadline=conn.deadline(20))


def get_and_die(opening: dict[str, Any], number: int) -> None:
    die_at_line(number)
    with create_connector("shared_memory", **opening) as conn:
        view = conn.get("k")
        assert (view == PAYLOAD).all()


def killed_at_each_line(target: Any, opening: dict[str, Any]) -> Iterator[BaseProcess]:
    """Start a child again and again, each killed a few lines later than the one before, until one survives."""
    number = 1
    survived = False
    while not survived:
        child = nursery.Process(target=target, args=(opening, number))
        child.start()
        yield child
        child.join(30)
        assert child.exitcode in (0, -signal.SIGKILL), f"line {number}: exit code {child.exitcode}"
        survived = child.exitcode == 0
        number += STRIDE
    assert number > 10 * STRIDE


def get_while_alive(conn: OmniConnector, child: BaseProcess) -> Any:
    """Get the child's payload; None if it died too early for that."""
    while True:
        alive = child.is_alive()
        try:
            return conn.get("k", timeout=2)
        except (PeerLostError, TransferTimeoutError):
            if not alive:
                return None
            time.sleep(0.002)


def test_a_producer_may_be_killed_at_any_line(edge: Edge) -> None:
    with edge.open(Role.CONSUMER) as consumer:
        for child in killed_at_each_line(put_and_die, edge.opening(Role.PRODUCER)):
            got = get_while_alive(consumer, child)
            assert got is None or (got == PAYLOAD).all()
        assert got is not None
    with edge.open() as conn:
        conn.put("k", 1)
        assert conn.get("k") == 1
        assert len(edge.files()) == 2
    assert edge.files() == []


def test_a_consumer_may_be_killed_at_any_line(edge: Edge) -> None:
    with edge.open(Role.PRODUCER) as producer, edge.open(Role.CONSUMER) as other:
        metadata = producer.put("k", PAYLOAD)
        for child in killed_at_each_line(get_and_die, edge.opening(Role.CONSUMER)):
            child.join(30)
            # whatever the dead one held or was promised comes back: the payload to others, or its memory to the pool
            assert eventually(lambda: producer.exists(["k"]) == [True] or producer.transport.usage().bytes_held == 0)
            if producer.exists(["k"]) == [True]:
                assert (other.get("k", metadata) == PAYLOAD).all()
            assert eventually(lambda: producer.transport.usage().bytes_held == 0)
            producer.put("k", PAYLOAD)


def test_a_waiting_consumer_learns_of_the_death_at_once(edge: Edge) -> None:
    with edge.peer(produce, Role.PRODUCER) as (pipe, process), edge.open(Role.CONSUMER) as conn:
        pipe.recv()
        pipe.send(("k", 1, {}))
        metadata = pipe.recv()
        assert conn.get("k", metadata) == 1
        handle = conn.submit_get("never")
        assert not handle.done()
        process.kill()
        start_s = time.monotonic()
        with pytest.raises(PeerLostError):
            handle.result(20)
        assert time.monotonic() - start_s < 5


def test_unread_payloads_die_with_their_producer(edge: Edge) -> None:
    with edge.open(Role.CONSUMER) as conn:
        with edge.peer(produce, Role.PRODUCER) as (pipe, process):
            pipe.recv()
            pipe.send(("k", 1, {}))
            metadata = pipe.recv()
            process.kill()
            process.join()
        for where in (metadata, None):
            start_s = time.monotonic()
            with pytest.raises(PeerLostError):
                conn.get("k", where, timeout=20)
            assert time.monotonic() - start_s < 5
        # the next life of the producer is found, and is not taken for the dead one
        with edge.open(Role.PRODUCER) as reborn:
            reborn.put("k", 2)
            with pytest.raises(PeerLostError):
                conn.get("k", metadata)
            assert conn.get("k") == 2


def hold_a_view(conn: OmniConnector, pipe: Connection) -> None:
    view = conn.get("k")
    pipe.send(int(view.sum()))
    pipe.recv()


def ask_ahead(conn: OmniConnector, pipe: Connection) -> None:
    handle = conn.submit_get("k")
    pipe.send(handle.done())
    pipe.recv()


def test_a_consumer_that_dies_with_a_view_gives_the_memory_back(edge: Edge) -> None:
    with edge.open(Role.PRODUCER) as producer, edge.peer(hold_a_view, Role.CONSUMER) as (pipe, process):
        producer.put("k", np.ones(1 << 20, np.uint8))
        assert pipe.recv() == 1 << 20
        assert producer.transport.usage().bytes_held > 1 << 20
        process.kill()
        assert eventually(lambda: producer.transport.usage().bytes_held == 0)


def test_what_a_dead_consumer_was_promised_goes_to_the_next(edge: Edge) -> None:
    with edge.open(Role.PRODUCER) as producer, edge.peer(ask_ahead, Role.CONSUMER) as (pipe, process):
        producer.put("other", 0)
        assert pipe.recv() is False
        producer.put("k", "precious")
        process.kill()
        process.join()
        with edge.open(Role.CONSUMER) as conn:
            assert conn.get("k") == "precious"


def test_a_stopped_consumer_does_not_stop_the_producer(edge: Edge) -> None:
    with edge.open(Role.PRODUCER) as producer, edge.peer(ask_ahead, Role.CONSUMER) as (pipe, process):
        pipe.recv()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        try:
            for n in range(2000):
                producer.put(f"k{n}", n)
            with edge.open(Role.CONSUMER) as conn:
                assert [conn.get(f"k{n}") for n in range(2000)] == list(range(2000))
        finally:
            os.kill(process.pid, signal.SIGCONT)


def test_a_forked_child_is_told_so_and_does_not_keep_its_parent_alive(edge: Edge) -> None:
    with edge.peer(fork_and_wait, Role.PRODUCER) as (pipe, process), edge.open(Role.CONSUMER) as conn:
        assert conn.get("k") == 1
        child, error = pipe.recv()
        try:
            assert error == ForkedError.__name__
            handle = conn.submit_get("never")
            assert not handle.done()
            process.kill()
            with pytest.raises(PeerLostError):
                handle.result(20)
        finally:
            os.kill(child, signal.SIGKILL)


def fork_and_wait(conn: OmniConnector, pipe: Connection) -> None:
    conn.put("k", 1)
    child = os.fork()
    if not child:
        try:
            conn.put("k", 2)
        except ForkedError as error:
            pipe.send((os.getpid(), type(error).__name__))
        conn.close()
        signal.pause()
    pipe.recv()


def test_only_what_is_dead_is_swept(edge: Edge) -> None:
    with edge.open(Role.PRODUCER) as alive:
        alive.put("k", 1)
        foreign = edge.folder / "somebody-elses.sock"
        foreign.touch()
        with edge.peer(produce, Role.PRODUCER, replica=1) as (pipe, process):
            pipe.recv()
            pipe.send(("x", 1, {}))
            pipe.recv()
            assert len(edge.files()) == 5
            process.kill()
            process.join()
        assert len(edge.files()) == 5
        with Edge(edge.folder).open(Role.CONSUMER, edge=("another", "edge")) as conn:
            assert len(edge.files()) == 3
            assert foreign.exists()
            assert not conn.submit_get("k").done()
        with edge.open(Role.CONSUMER) as conn:
            assert conn.get("k") == 1

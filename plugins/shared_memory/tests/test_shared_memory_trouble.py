"""What goes wrong in the middle of something: no file descriptors left, a folder that is mended, consumers that leave."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from shared_memory_edge import Edge

from omni_connector_core import NOT_READY, OmniConnector, Role
from omni_connector_core.errors import BackendUnavailableError, IncompatibleMetadataError, OmniConnectorError
from omni_connector_shared_memory import protocol
from omni_connector_shared_memory.channel import Channel


@pytest.fixture
def edge(tmp_path: Path) -> Edge:
    return Edge(tmp_path / "run")


@contextmanager
def files_left(count: int) -> Iterator[None]:
    """Let this process open so many more files and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    taken: list[int] = []
    with pytest.raises(OSError, match="Too many open files"):
        while True:
            taken.append(os.dup(0))
    try:
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def run_out_of_files(conn: OmniConnector, pipe: Connection) -> None:
    """Put, then answer each number with the processor time spent while only so many files could be opened, until told."""
    conn.put("k", b"payload")
    pipe.send("ready")
    while True:
        try:
            count = pipe.recv()
        except EOFError:
            return
        with files_left(count):
            began_s = time.process_time()
            pipe.send("out of files")
            pipe.recv()
            spent_s = time.process_time() - began_s
        pipe.send(spent_s)


@pytest.mark.parametrize("count", [0, 1])
def test_a_producer_without_files_admits_consumers_when_it_has_some_again(edge: Edge, count: int) -> None:
    with edge.peer(run_out_of_files, Role.PRODUCER) as (pipe, _), edge.open(Role.CONSUMER) as consumer:
        assert pipe.recv() == "ready"
        pipe.send(count)
        assert pipe.recv() == "out of files"
        began_s = time.monotonic()
        with pytest.raises(OmniConnectorError):
            consumer.get("k", timeout=0.5)
        took_s = time.monotonic() - began_s
        pipe.send("go on")
        assert pipe.recv() < max(0.5 * took_s, 0.2)  # it does not spin
        assert consumer.get("k") == b"payload"


def test_a_consumer_whose_folder_was_mended_finds_the_producer(edge: Edge) -> None:
    edge.folder.mkdir()
    edge.folder.chmod(0o777)
    with edge.open(Role.CONSUMER) as consumer:
        with pytest.raises(BackendUnavailableError, match="other users may write"):
            consumer.get("k", timeout=1)
        edge.folder.chmod(0o700)
        with edge.open(Role.PRODUCER) as producer:
            producer.put("k", 1)
            assert consumer.get("k", timeout=10) == 1


def test_a_put_that_cannot_open_files_raises_ours_and_leaves_nothing(edge: Edge) -> None:
    with edge.open(Role.PRODUCER) as producer:
        edge.folder.mkdir(mode=0o700)
        before = set(os.listdir("/proc/self/fd"))
        for count in range(5):
            with files_left(count), pytest.raises(OmniConnectorError, match="Too many open files"):
                producer.put("k", 1)
            assert not edge.files()
        # the errors hold their tracebacks
        gc.collect()
        assert set(os.listdir("/proc/self/fd")) <= before
        producer.put("k", 1)


def test_a_put_that_is_interrupted_gives_no_live_memory_away(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    send = Channel.send

    def interrupt(channel: Channel, message: protocol.ToConsumer | protocol.ToProducer) -> None:
        if isinstance(message, protocol.Found):
            raise KeyboardInterrupt  # as Ctrl-C may at any point
        send(channel, message)

    with edge.open(Role.PRODUCER) as producer, edge.open(Role.CONSUMER) as consumer:
        producer.put("first", 0)
        assert consumer.get("first") == 0
        assert consumer.poll("a") is NOT_READY
        with monkeypatch.context() as patched:
            patched.setattr(Channel, "send", interrupt)
            with pytest.raises(KeyboardInterrupt):
                producer.put("a", b"a" * 5000, readers=2)
        producer.put("b", b"b" * 5000)
        with edge.open(Role.CONSUMER) as other:
            assert other.get("a") == b"a" * 5000


@pytest.mark.parametrize("incarnation", [[1], {}, 5])
def test_damaged_metadata_is_an_error_of_ours(edge: Edge, incarnation: object) -> None:
    with edge.open() as conn:
        metadata = conn.put("k", 1)
        with pytest.raises(IncompatibleMetadataError, match="damaged"):
            conn.get("k", {**metadata, "at": {"incarnation": incarnation}}, timeout=1)
        assert conn.get("k", metadata) == 1

"""A socket that never waits."""

import ctypes
import socket

import pytest

from omni_connector_core.nonblocking import NonblockingSocket


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        nonblocking = NonblockingSocket(ours)
        yield nonblocking, theirs
        nonblocking.close()


def test_sends_and_receives_whole_messages(pair):
    ours, theirs = pair
    assert ours.send(b"there") == 5
    assert theirs.recv(100) == b"there"
    theirs.send(b"a")
    theirs.send(b"bc")
    memory = ctypes.create_string_buffer(100)
    assert memory[: ours.receive_into(memory)] == b"a"
    assert memory[: ours.receive_into(memory)] == b"bc"


def test_never_waits(pair):
    ours, _ = pair
    with pytest.raises(BlockingIOError):
        ours.receive_into(ctypes.create_string_buffer(100))
    with pytest.raises(BlockingIOError):
        while True:
            ours.send(b"x" * 1000)


def test_tells_the_end(pair):
    ours, theirs = pair
    theirs.close()
    assert not ours.receive_into(ctypes.create_string_buffer(100))
    with pytest.raises(BrokenPipeError):
        ours.send(b"x")


def test_a_closed_one_touches_no_other_file(pair):
    ours, _ = pair
    number = ours.fd
    ours.close()
    other, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other, end:
        assert other.fileno() == number, "the number is another file's now"
        with pytest.raises(OSError, match="Bad file descriptor"):
            ours.send(b"x")
        with pytest.raises(OSError, match="Bad file descriptor"):
            ours.receive_into(ctypes.create_string_buffer(100))

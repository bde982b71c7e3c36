"""What a one-sided transport says when the kernel refuses, and what it forgets as producers come and go."""

import ctypes
import errno
import os
import time

import pytest

from omni_connector_core.arena import HostMemory
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import BackendUnavailableError
from omni_connector_core.onesided import hub as hubs
from omni_connector_core.onesided import messages as m
from omni_connector_core.onesided.channel import Channels
from omni_connector_core.onesided.discovery import Advert, Directory, Found, Watch
from omni_connector_core.onesided.early import Early
from omni_connector_core.onesided.engine import Piece
from omni_connector_core.onesided.hub import Hub
from omni_connector_core.onesided.listener import Listener
from omni_connector_core.onesided.server import ControlServer

SCOPE = m.Scope("test", "namespace", "a", "b")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return Directory.of(SCOPE)


def no_descriptors(*_, **__):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_no_descriptor_left_is_an_error_of_ours_wherever_one_is_needed(directory, monkeypatch):
    advert = Advert(directory, Found("127.0.0.1:1", "i", 0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_descriptors)
        with pytest.raises(BackendUnavailableError, match="no file descriptor is left"):
            directory.producers()  # and not: there is no producer
        with pytest.raises(BackendUnavailableError, match="no file descriptor is left"):
            Advert(directory, Found("127.0.0.1:1", "j", 0, 0))
    for module, name in (("os", "eventfd"), ("select", "epoll"), ("socket", "create_server")):
        with monkeypatch.context() as patch:
            patch.setattr(f"{module}.{name}", no_descriptors)
            with pytest.raises(BackendUnavailableError, match="no file descriptor is left"):
                Listener("127.0.0.1", 0, None, None, greeted=None, heard=None, left=None)
    advert.withdraw()


def test_the_limit_of_inotify_is_an_error_of_ours(directory, monkeypatch):
    class Full:
        def __init__(self, *_, **__):
            pass

        def inotify_init1(self, _):
            ctypes.set_errno(errno.EMFILE)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", Full)
    with pytest.raises(BackendUnavailableError, match="cannot watch") as caught:
        Watch(directory)
    assert "max_user_instances" in caught.value.hint


def test_a_full_disk_leaves_no_half_file(directory, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(BackendUnavailableError, match="No space left"):
            Advert(directory, Found("127.0.0.1:1", "i", 0, 0))
    assert os.listdir(directory.path) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_early_questions_are_counted_once_and_forgotten_whole():
    early = Early()
    for client in ("a", "b"):
        for number in (1, 2, 2):
            early.add(client, m.Ask(number, SCOPE, ("k", 0, "")))
    assert len(early) == 4
    early.forget("a", 2)
    early.forget("a", 7)
    early.forget_all("b")
    assert (len(early), "a" in early, "b" in early) == (1, True, False)
    assert [(client, ask.number) for client, ask in early.take_all()] == [("a", 1)]
    assert (len(early), "a" in early) == (0, False)


def test_the_time_for_a_question_does_not_grow_with_those_that_wait():
    def cost_s(count):
        early = Early()
        for number in range(count):
            early.add(number % 100, m.Ask(number, SCOPE, ("k", 0, "")))
        best_s = float("inf")
        for _ in range(20):
            start_s = time.perf_counter()
            for number in range(100):
                early.add("new", m.Ask(number, SCOPE, ("k", 0, "")))
                early.forget("new", number)
            best_s = min(best_s, time.perf_counter() - start_s)
        return best_s

    assert cost_s(50_000) < 10 * cost_s(100)  # 500 times as many


def test_channels_to_producers_that_have_gone_are_not_kept():
    channels = Channels(None)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):  # a producer that is restarted, each time on another port
        server = ControlServer("127.0.0.1", 0, None)
        channels.call(server.address, m.Ping(m.new_number()), m.Pong, Deadline(10))
        server.close()
    assert len(os.listdir("/proc/self/fd")) - before <= 3
    assert len(channels._idle) <= 2
    channels.close()


def test_contacts_of_engines_that_were_restarted_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(hubs, "_CONTACTS", 10)

    class Engine:
        def connect(self, blob):
            return blob

    hub = Hub(Engine)
    for number in range(50):
        hub.connect(f"engine {number}", b"")
    assert len(hub._current.peers) == 10
    assert hub.peer("engine 49") is not None


class TimedEngine:
    """Its reads take as long as they are told."""

    spin_nbytes, spin_s = 1000, 1e-3
    takes_s = 0.02

    def connect(self, blob):
        return blob

    def start(self, peer, pieces):
        return time.monotonic() + self.takes_s

    def done(self, until_s):
        return time.monotonic() >= until_s


def test_one_slow_read_does_not_make_the_next_ones_sleep():
    engine = TimedEngine()
    hub = Hub(lambda: engine)
    hub.connect("peer", b"").result(10)

    def read_s():
        began_s = time.monotonic()
        assert hub.start("peer", [Piece(0, 0, 1 << 20)]).wait(began_s + 60)
        return time.monotonic() - began_s

    for _ in range(3):
        assert read_s() >= 0.02
    engine.takes_s = 1.0
    assert read_s() >= 1.0
    engine.takes_s = 0.02
    assert min(read_s() for _ in range(3)) < 0.2  # and not most of the second that the slow one took
    engine.takes_s = 0.002
    assert min(read_s() for _ in range(6)) < 0.015  # nor most of the 20 ms that those before took


def test_a_message_nested_deeper_than_the_stack_is_refused_like_any_other_nonsense():
    raw = b"\x01\x94\x07\x01\x90" + b"\x91" * 3000 + b"\x90"
    for decode in (m.decode_question, m.decode_answer):
        with pytest.raises(m.ProtocolError):
            decode(raw)


def test_a_view_of_what_was_received_needs_no_registration_of_its_own():
    registered = {}

    class Engine:
        def register(self, address, nbytes):
            registered[address] = nbytes

        def unregister(self, address):
            del registered[address]

    hub = Hub(Engine)
    arena = hub.arena("a", lambda: HostMemory(1 << 20))
    hub.register(arena.address + 4096, 4096)
    assert registered == {arena.address: 1 << 20}

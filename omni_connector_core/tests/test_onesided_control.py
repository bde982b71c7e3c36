"""The control channel alone: real sockets, ledger and arena, no engine."""

import contextlib
import os
import pickle
import random
import secrets
import socket
import threading
import time

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from omni_connector_core.arena import Arena, HostMemory
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import (
    IncompatibleMetadataError,
    OptionError,
    PeerLostError,
    RequestAbandonedError,
)
from omni_connector_core.key import Key
from omni_connector_core.ledger import Ledger
from omni_connector_core.onesided import messages as m
from omni_connector_core.onesided.channel import Channels, wait_on
from omni_connector_core.onesided.server import ControlServer
from omni_connector_core.onesided.sockets import read_secret

SCOPE = m.Scope("test", "namespace", "a", "b")
OTHER_SCOPE = m.Scope("test", "namespace", "a", "c")


class ProducerEnd:
    """A `Route` over real memory."""

    def __init__(self, scope=SCOPE, producer=(0, 0)):
        self.scope, self.producer = scope, producer
        self.instance = secrets.token_hex(8)
        self.arena = Arena(HostMemory(1 << 20))
        self.ledger = Ledger(self.arena.release)
        self.progress_s = None

    def progress(self):
        raise AssertionError("nobody asked for it")

    def endpoint(self):
        return "engine", b"blob"

    def put(self, name, nbytes=100, readers=1):
        region = self.arena.try_allocate(nbytes)
        self.ledger.publish(Key(name), region, nbytes=nbytes, readers=readers, ttl_s=60, overwrite=False)
        return region


@pytest.fixture
def server():
    made = ControlServer("127.0.0.1", 0, None)
    yield made
    made.close()


@pytest.fixture
def producer(server):
    made = ProducerEnd()
    server.add(made)
    return made


@pytest.fixture
def channels():
    made = Channels(None)
    yield made
    made.close()


@pytest.fixture
def channel(server, channels):
    made = channels.take(server.address)
    yield made
    channels.put_back(made)


def ask(channel, name, scope=SCOPE, **fields):
    question = m.Ask(m.new_number(), scope, Key(name), **fields)
    channel.send(question)
    return question.number


def answer(channel, number, within_s=10.0):
    deadline = Deadline(within_s)
    while not deadline.expired():
        got = channel.receive()
        if got is not None and got.number == number:
            return got
        if got is None:
            if (lost := channel.lost()) is not None:
                raise lost
            wait_on([channel], deadline.at_s)
    raise AssertionError("no answer")


def nothing_more(channel, for_s=0.05):
    wait_on([channel], time.monotonic() + for_s)
    return channel.receive() is None


# ---- what honest consumers get


def test_what_is_there_is_found_and_freed_when_done(producer, channel):
    region = producer.put("k", 100)
    found = answer(channel, ask(channel, "k"))
    assert isinstance(found, m.Found)
    assert (found.address, found.nbytes) == (region.address, 100)
    channel.send(m.Done(m.new_number(), found.claim))
    answer(channel, ping(channel))
    assert producer.arena.used_bytes == 0


def ping(channel, *claims):
    question = m.Ping(m.new_number(), list(claims))
    channel.send(question)
    return question.number


def test_who_waits_is_told_at_once(producer, channel):
    number = ask(channel, "k")
    assert isinstance(answer(channel, number), m.Pending)
    producer.put("k")
    assert isinstance(answer(channel, number), m.Found)


def test_who_asks_before_the_producer_is_there_is_told(server, channel):
    number = ask(channel, "k")
    assert isinstance(answer(channel, number), m.Pending)
    late = ProducerEnd()
    late.put("k")
    server.add(late)
    assert isinstance(answer(channel, number), m.Found)


def test_an_unread_claim_goes_to_the_next(producer, channel, channels, server):
    producer.put("k")
    found = answer(channel, ask(channel, "k"))
    other = channels.take(server.address)
    number = ask(other, "k")
    assert isinstance(answer(other, number), m.Pending)
    channel.send(m.Done(m.new_number(), found.claim, unread=True))
    assert isinstance(answer(other, number), m.Found)
    channels.put_back(other)


def test_cancel_also_gives_back_what_is_on_its_way(producer, channel, channels, server):
    number = ask(channel, "k")
    answer(channel, number)
    producer.put("k")
    channel.send(m.Cancel(number))  # the Found crosses it
    other = channels.take(server.address)
    assert isinstance(answer(other, ask(other, "k")), m.Found)
    channels.put_back(other)


def test_cancel_goes_out_on_a_connection_that_was_never_looked_at(producer, channels, server):
    hasty = channels.take(server.address)
    number = ask(hasty, "k")
    deadline = Deadline(10)
    producer.put("k")
    while not producer.ledger.claims_out():
        assert not deadline.expired()
        os.sched_yield()
    assert hasty.reachable  # as far as it knows it is not connected yet
    hasty.send(m.Cancel(number))
    channels.put_back(hasty)
    other = channels.take(server.address)
    assert isinstance(answer(other, ask(other, "k")), m.Found | m.Pending)
    while not producer.ledger.claims_out():
        assert not deadline.expired()
        os.sched_yield()
    channels.put_back(other)


def test_a_consumer_that_vanishes_gives_its_claims_back(producer, server, channels, monkeypatch):
    monkeypatch.setattr(m, "LEASE_S", 0.3)
    gone = Channels(None)
    vanishing = gone.take(server.address)
    producer.put("k")
    assert isinstance(answer(vanishing, ask(vanishing, "k")), m.Found)
    vanishing.close()
    gone.close()
    other = channels.take(server.address)
    number = ask(other, "k")
    assert isinstance(answer(other, number), m.Pending)
    while (got := channel_answer(other, number)) is None:
        other.send(m.Ping(m.new_number()))
    assert isinstance(got, m.Found)
    channels.put_back(other)


def channel_answer(channel, number):
    wait_on([channel], time.monotonic() + 0.1)
    while (got := channel.receive()) is not None:
        if got.number == number:
            return got
    return None


def test_a_question_that_was_repeated_leaves_no_wait_behind(producer, channel):
    number = ask(channel, "k")
    answer(channel, number)
    producer.put("k")
    found = answer(channel, number)
    channel.send(m.Ask(number, SCOPE, Key("k")))  # as after a reconnect, crossing the answer
    channel.send(m.Done(m.new_number(), found.claim))
    answer(channel, ping(channel))
    producer.put("k")
    assert isinstance(answer(channel, ask(channel, "k")), m.Found)


def test_ping_says_which_claims_stand(producer, channel):
    producer.put("k")
    found = answer(channel, ask(channel, "k"))
    assert answer(channel, ping(channel, found.claim, found.claim + 999)).claims == [found.claim]


def test_a_closed_or_restarted_producer_is_said_to_be_lost(server, producer, channel):
    producer.put("k")
    got = answer(channel, ask(channel, "k", instance="0" * 16))
    assert (got.code, isinstance(got, m.Failed)) == ("PeerLostError", True)
    waiting = ask(channel, "other")
    answer(channel, waiting)
    producer.ledger.close()
    assert answer(channel, waiting).code == "PeerLostError"


def test_cleanup_and_exists(producer, channels, server):
    producer.put("k")
    keys = [Key("k"), Key("absent")]
    deadline = Deadline(10)
    exists = m.Exists(m.new_number(), SCOPE, keys)
    assert channels.call(server.address, exists, m.Truths, deadline).values == [True, False]
    cleanup = m.Cleanup(m.new_number(), SCOPE, ["k", "absent"])
    assert channels.call(server.address, cleanup, m.Count, deadline).count == 1
    with pytest.raises(RequestAbandonedError):
        producer.put("k")


def test_another_edges_keys_are_not_served(server, producer, channel):
    producer.put("k")
    assert isinstance(answer(channel, ask(channel, "k", OTHER_SCOPE)), m.Pending)
    exists = m.Exists(m.new_number(), OTHER_SCOPE, [Key("k")])
    channel.send(exists)
    assert answer(channel, exists.number).values == [False]
    cleanup = m.Cleanup(m.new_number(), OTHER_SCOPE, ["k"])
    channel.send(cleanup)
    assert answer(channel, cleanup.number).count == 0
    assert producer.ledger.exists(Key("k"))


def test_an_idle_server_uses_no_cpu(server, producer, channel):
    answer(channel, ping(channel))
    process = psutil.Process()
    thread = next(t for t in process.threads() if t.id == server_thread_id())
    before = thread.user_time + thread.system_time
    time.sleep(1.0)
    after = next(t for t in process.threads() if t.id == thread.id)
    assert after.user_time + after.system_time - before < 0.02


def server_thread_id():
    return next(thread.native_id for thread in threading.enumerate() if thread.name == "omni-control")


# ---- peers that die, restart, or are somebody else


def test_nobody_listening_is_said_soon(channels):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    start = time.monotonic()
    with pytest.raises(PeerLostError, match="nobody listens"):
        channels.call(address, m.Ping(m.new_number()), m.Pong, Deadline(30))
    assert time.monotonic() - start < 3


def test_silence_is_a_lost_peer_long_before_the_deadline(channels, monkeypatch):
    monkeypatch.setattr(m, "LOST_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        start = time.monotonic()
        with pytest.raises(PeerLostError, match="not answered"):
            channels.call(f"127.0.0.1:{mute.getsockname()[1]}", m.Ping(m.new_number()), m.Pong, Deadline(60))
        assert time.monotonic() - start < 10


def test_a_restarted_server_on_the_same_port_is_found_again(channels):
    first = ControlServer("127.0.0.1", 0, None)
    port = int(first.address.rpartition(":")[2])
    channels.call(first.address, m.Ping(m.new_number()), m.Pong, Deadline(10))
    first.close()
    second = ControlServer("127.0.0.1", port, None)
    assert second.address == first.address
    channels.call(second.address, m.Ping(m.new_number()), m.Pong, Deadline(10))
    second.close()


def test_a_taken_port_is_no_failure(server, caplog):
    port = int(server.address.rpartition(":")[2])
    second = ControlServer("127.0.0.1", port, None)
    assert second.address != server.address
    assert "is taken" in caplog.text
    second.close()


def test_another_protocol_version_is_named(server, channels):
    channel = channels.take(server.address)
    channel.socket.send(bytes([m.PROTOCOL + 1]) + b"\x93\x01\x02\x03")
    got = answer(channel, 0)
    assert got.code == "IncompatibleMetadataError"
    assert f"protocol {m.PROTOCOL + 1}" in got.message
    channels.put_back(channel)


# ---- the secret


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return path


def test_who_knows_the_secret_is_served_and_nobody_else(secret_file):
    server = ControlServer("127.0.0.1", 0, read_secret(str(secret_file)))
    for secret, good in ((read_secret(str(secret_file)), True), (None, False), (b"x" * 32, False)):
        channels = Channels(secret)
        outcome = contextlib.nullcontext() if good else pytest.raises(PeerLostError, match="same secret_file")
        with outcome:
            channels.call(server.address, m.Ping(m.new_number()), m.Pong, Deadline(60))
        channels.close()
    server.close()


def test_a_secret_that_others_can_read_is_refused(secret_file):
    secret_file.chmod(0o644)
    with pytest.raises(OptionError, match="chmod 600"):
        read_secret(str(secret_file))


def test_a_short_secret_is_refused(secret_file):
    secret_file.write_text("hunter2")
    with pytest.raises(OptionError, match="openssl rand"):
        read_secret(str(secret_file))


def test_listening_wide_without_a_secret_is_said_loudly(caplog, secret_file):
    ControlServer("0.0.0.0", 0, None).close()
    assert "WITHOUT authentication" in caplog.text
    caplog.clear()
    ControlServer("0.0.0.0", 0, read_secret(str(secret_file))).close()
    assert not caplog.records


# ---- hostile peers


def raw_connection(server):
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def hostile_messages():
    rng = random.Random(7)
    for _ in range(300):
        yield rng.randbytes(rng.randrange(0, 300))
        yield bytes([m.PROTOCOL]) + rng.randbytes(rng.randrange(0, 300))
    honest = m.encode(m.Ask(1, SCOPE, Key("k")))
    yield from (honest[:n] for n in range(len(honest)))
    for n in range(len(honest)):
        yield honest[:n] + bytes([rng.randrange(256)]) + honest[n + 1 :]
    yield bytes([m.PROTOCOL]) + pickle.dumps({"cmd": "x"})
    yield bytes([m.PROTOCOL]) + msgspec.msgpack.encode([[[[[]]]]] * 1000)
    yield bytes([m.PROTOCOL]) + b"\x91" * 100_000  # deeply nested
    yield m.encode(m.Ask(1, SCOPE, ("", 0, "")))
    yield m.encode(m.Ask(1, SCOPE, ("x" * 5000, -1, "")))
    yield m.encode(m.Done(1, 12345))
    yield m.encode(m.Cancel(12345))
    yield m.encode(m.Exists(1, SCOPE, [("k", 0, "")] * 10_000))


class Exploit:
    def __reduce__(self):
        return os.mkdir, (os.environ["EXPLOIT_FOLDER"],)


def test_hostile_messages_do_nothing(server, producer, channel, tmp_path, monkeypatch):
    folder = tmp_path / "exploited"
    monkeypatch.setenv("EXPLOIT_FOLDER", str(folder))
    producer.put("secret payload")
    with zmq.Context() as context, context.socket(zmq.DEALER) as attacker:
        attacker.linger = 0
        attacker.connect(f"tcp://{server.address}")
        for message in [*hostile_messages(), pickle.dumps(Exploit()), b"\x01" + pickle.dumps(Exploit())]:
            attacker.send(message)
            attacker.send_multipart([message, message])
        attacker.send(m.encode(m.Ping(4242)))
        poller = zmq.Poller()
        poller.register(attacker, zmq.POLLIN)
        while True:
            assert poller.poll(10_000)
            reply = attacker.recv()
            if reply[0] == m.PROTOCOL and m.decode_answer(reply) == m.Pong(4242, []):
                break  # every message before it was handled
    assert server.refused > 600
    assert not folder.exists()
    assert isinstance(answer(channel, ask(channel, "secret payload")), m.Found)


def test_hostile_bytes_below_zmq_do_nothing(server, producer, channel):
    producer.put("k")
    rng = random.Random(3)
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01NULL" + b"\0" * 48
    for junk in (b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(5000), greeting + rng.randbytes(5000), greeting[:20]):
        with raw_connection(server) as connection, contextlib.suppress(OSError):
            connection.sendall(junk)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(0.2)
            while connection.recv(4096):
                pass
    assert isinstance(answer(channel, ask(channel, "k")), m.Found)


def test_a_too_long_message_ends_its_connection_alone(server, producer, channel):
    producer.put("k")
    with zmq.Context() as context, context.socket(zmq.DEALER) as attacker:
        attacker.linger = 0
        attacker.connect(f"tcp://{server.address}")
        attacker.send(bytes([m.PROTOCOL]) + bytes(m.MAX_MESSAGE_NBYTES))
        assert isinstance(answer(channel, ask(channel, "k")), m.Found)


def test_a_thousand_connections_leave_nothing(server, producer, channel):
    answer(channel, ping(channel))
    process = psutil.Process()
    before = process.num_fds()
    connections = [raw_connection(server) for _ in range(400)]  # mute; each is a fd at both ends, and ours are limited
    producer.put("k")
    assert isinstance(answer(channel, ask(channel, "k")), m.Found)
    for connection in connections:
        connection.close()
    for _ in range(600):  # and some that come and go
        raw_connection(server).close()
    deadline = Deadline(10)
    while process.num_fds() > before and not deadline.expired():
        answer(channel, ping(channel))
    assert process.num_fds() <= before


def test_a_flood_of_questions_is_bounded(server, producer, monkeypatch):
    monkeypatch.setattr("omni_connector_core.onesided.server.MAX_WAITING", 100)
    with zmq.Context() as context, context.socket(zmq.DEALER) as attacker:
        attacker.linger = 0
        attacker.connect(f"tcp://{server.address}")
        for n in range(1, 301):
            attacker.send(m.encode(m.Ask(n, SCOPE, Key(f"k{n}"))))
        answers = [m.decode_answer(attacker.recv()) for _ in range(300)]
    assert sum(isinstance(got, m.Pending) for got in answers) == 100
    assert {got.code for got in answers if isinstance(got, m.Failed)} == {"CapacityError"}


def test_answers_that_are_none_are_named(channels):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as imposter:
        imposter.linger = 0
        port = imposter.bind_to_random_port("tcp://127.0.0.1")
        channel = channels.take(f"127.0.0.1:{port}")
        channel.send(m.Ping(1))
        identity, _ = imposter.recv_multipart()
        imposter.send_multipart([identity, bytes(np.arange(50, dtype=np.uint8))])
        with pytest.raises(IncompatibleMetadataError):
            answer(channel, 1)
        channel.close()

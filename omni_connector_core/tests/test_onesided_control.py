"""The control channel alone: real sockets, ledger and arena, no engine."""

import contextlib
import os
import pickle
import random
import secrets
import select
import socket
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import psutil
import pytest

from omni_connector_core.arena import Arena, HostMemory
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import (
    BackendUnavailableError,
    IncompatibleMetadataError,
    OptionError,
    PeerLostError,
    RequestAbandonedError,
)
from omni_connector_core.key import Key
from omni_connector_core.ledger import Ledger
from omni_connector_core.onesided import messages as m
from omni_connector_core.onesided.channel import Channels, wait_on
from omni_connector_core.onesided.reading import Reading
from omni_connector_core.onesided.server import ControlServer
from omni_connector_core.onesided.sockets import Connecting, read_secret
from omni_connector_core.onesided.wire import NAME_NBYTES, DeniedError, Wire, WireError

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
        self.eager_nbytes = 64 << 10

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


def test_what_was_cancelled_before_it_was_sent_is_asked_of_nobody(producer, channels, server):
    hasty = channels.take(server.address)
    number = ask(hasty, "k")
    producer.put("k")
    hasty.send(m.Cancel(number))
    channels.put_back(hasty)
    other = channels.take(server.address)
    assert isinstance(answer(other, ask(other, "k")), m.Found)
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


ASKING = """
import sys, time
from omni_connector_core.key import Key
from omni_connector_core.onesided import messages as m
from omni_connector_core.onesided.channel import Channels, wait_on
channel = Channels(None).take(sys.argv[1])
channel.send(m.Ask(1, m.Scope("test", "namespace", "a", "b"), Key("k")))
while True:
    wait_on([channel], time.monotonic() + 10)
    for answer in channel.answers():
        print(type(answer).__name__, flush=True)
"""


@pytest.fixture
def asking(server):
    """A consumer in a process of its own, which asks for the key k and says what it is answered."""
    with subprocess.Popen([sys.executable, "-c", ASKING, server.address], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_dead_process_holds_no_claim_until_the_end_of_its_lease(producer, channel, asking, monkeypatch):
    monkeypatch.setattr(m, "LEASE_S", 1e6)
    producer.put("k")
    assert asking.stdout.readline() == "Found\n"
    number = ask(channel, "k")
    assert isinstance(answer(channel, number), m.Pending)
    asking.kill()
    assert isinstance(answer(channel, number), m.Found)


def test_a_put_that_overtakes_the_news_of_a_consumers_death_is_not_lost_to_it(
    producer, server, channels, channel, asking, monkeypatch
):
    monkeypatch.setattr(m, "LEASE_S", 1e6)
    assert asking.stdout.readline() == "Pending\n"
    with server_thread_busy(producer, server, channels):
        asking.kill()
        asking.wait()
        producer.put("k")
    assert isinstance(answer(channel, ask(channel, "k")), m.Found)


@contextlib.contextmanager
def server_thread_busy(producer, server, channels):
    """The server's thread hears nothing meanwhile: it lets an engine work that takes its time."""
    busy, done = threading.Event(), threading.Event()

    def progress():
        busy.set()
        done.wait()

    claimant = channels.take(server.address)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(producer, "progress_s", 10.0)
    monkeypatch.setattr(producer, "progress", progress)
    producer.put("another")
    claim = answer(claimant, ask(claimant, "another")).claim
    try:
        assert busy.wait(10)
        yield
    finally:
        monkeypatch.undo()
        done.set()
    claimant.send(m.Done(m.new_number(), claim))
    channels.put_back(claimant)


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
    with Stranger(server) as stranger:
        stranger.wire.send(bytes([m.PROTOCOL + 1]) + b"\x93\x01\x02\x03")
        got = stranger.answer()
    assert got.code == "IncompatibleMetadataError"
    assert f"protocol {m.PROTOCOL + 1}" in got.message


def test_a_claim_and_a_question_survive_the_connection(server, producer, channel):
    producer.put("k")
    found = answer(channel, ask(channel, "k"))
    for _ in range(3):
        channel._wire._socket.sock.shutdown(socket.SHUT_RDWR)  # as by a reset, which the channel has not heard of
        assert answer(channel, ping(channel, found.claim)).claims == [found.claim]


def test_the_producer_hears_that_a_payload_was_read_also_when_the_connection_was_lost(producer, channels, server):
    channel = channels.take(server.address)
    producer.put("k")
    found = answer(channel, ask(channel, "k"))
    channel._wire._socket.sock.shutdown(socket.SHUT_RDWR)
    channel.send(m.Done(m.new_number(), found.claim))
    channel.settle(10)
    channels.put_back(channel)
    deadline = Deadline(5)  # half of the lease, upon which the payload would go to the next
    while producer.ledger.claims_out():
        assert not deadline.expired()
        os.sched_yield()
    assert producer.arena.used_bytes == 0


def test_a_question_that_was_lost_with_its_connection_is_asked_again(server, producer, channels):
    channel = channels.take(server.address)
    producer.put("k")
    found = answer(channel, ask(channel, "k"))
    steps = Reading(None, channel, msgspec.structs.replace(found, frame=b""), None)._describe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "send", lambda *_: None)  # the kernel took it, and the network did not
        pause = next(steps)
    channel._wire._socket.sock.shutdown(socket.SHUT_RDWR)
    deadline = Deadline(10)
    with pytest.raises(StopIteration) as end:
        while not deadline.expired():
            pause.block(deadline.at_s)
            pause = next(steps)
    assert end.value.value.blob == b"blob"
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


class Stranger:
    """Whoever says what it likes, over a connection that is greeted as it should be."""

    def __init__(self, server, secret=None):
        self.wire = Wire(raw_connection(server), secret)
        self.until(lambda: self.wire.reply(secrets.token_bytes(NAME_NBYTES)))
        self.until(self.wire.accepted)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wire.close()

    def until(self, done):
        deadline = Deadline(10)
        while not (found := done()):
            assert not deadline.expired()
            poll = select.poll()
            poll.register(self.wire.fileno(), select.POLLIN | (select.POLLOUT if self.wire.unsent else 0))
            poll.poll(100)
            self.wire.flush()
        return found

    def answer(self):
        raw = self.until(self.wire.receive)
        if raw[0] != m.PROTOCOL:
            return None
        return m.decode_answer(raw)


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
    with Stranger(server) as stranger:
        for message in [*hostile_messages(), pickle.dumps(Exploit()), b"\x01" + pickle.dumps(Exploit())]:
            stranger.wire.send(message)
        stranger.wire.send(m.encode(m.Ping(4242)))
        while stranger.answer() != m.Pong(4242, []):  # every message before it was handled
            pass
    assert server.refused > 300
    assert not folder.exists()
    assert isinstance(answer(channel, ask(channel, "secret payload")), m.Found)


def test_hostile_bytes_below_the_messages_do_nothing(server, producer, channel):
    producer.put("k")
    rng = random.Random(3)
    reply = b"omnictl1" + bytes(64)
    framed = reply + (100).to_bytes(4, "little")
    for junk in (b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(5000), reply[:20], reply + rng.randbytes(5000), framed):
        with raw_connection(server) as connection, contextlib.suppress(OSError):
            connection.sendall(junk)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(10)
            while connection.recv(4096):  # until it is shown the door
                pass
    assert isinstance(answer(channel, ask(channel, "k")), m.Found)


def test_a_too_long_message_ends_its_connection_alone(server, producer, channel):
    producer.put("k")
    with Stranger(server) as stranger:
        stranger.wire.send(bytes(m.MAX_MESSAGE_NBYTES + 1))
        with pytest.raises(OSError, match="closed|reset|pipe"):
            stranger.until(stranger.wire.receive)
        assert isinstance(answer(channel, ask(channel, "k")), m.Found)


def test_who_does_not_say_who_it_is_is_shown_the_door(server, monkeypatch):
    monkeypatch.setattr("omni_connector_core.onesided.listener._GREETED_S", 0.1)
    with raw_connection(server) as mute:
        mute.settimeout(30)
        while mute.recv(100):
            pass


def test_who_does_not_read_is_dropped_and_what_it_claimed_goes_to_the_next(server, producer, channel, monkeypatch):
    monkeypatch.setattr("omni_connector_core.onesided.listener._MAX_UNSENT_NBYTES", 1 << 20)
    producer.put("k")
    producer.put("large", producer.eager_nbytes, readers=1000)
    with Stranger(server) as stranger:
        stranger.wire.send(m.encode(m.Ask(1, SCOPE, Key("k"))))
        assert isinstance(stranger.answer(), m.Found)
        number = ask(channel, "k")
        assert isinstance(answer(channel, number), m.Pending)
        with contextlib.suppress(OSError):  # it is thrown out in the middle of this
            for n in range(2, 1000):
                stranger.wire.send(m.encode(m.Ask(n, SCOPE, Key("large"))))
        assert isinstance(answer(channel, number), m.Found)


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
    with Stranger(server) as stranger:
        for n in range(1, 301):
            stranger.wire.send(m.encode(m.Ask(n, SCOPE, Key(f"k{n}"))))
        answers = [stranger.answer() for _ in range(300)]
    assert sum(isinstance(got, m.Pending) for got in answers) == 100
    assert {got.code for got in answers if isinstance(got, m.Failed)} == {"CapacityError"}


def test_answers_that_are_none_are_named(channels):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        channel = channels.take(f"127.0.0.1:{listener.getsockname()[1]}")
        channel.send(m.Ping(1))
        accepted, _ = listener.accept()
        imposter = Wire(accepted, None)
        imposter.greet()
        while imposter.accept() is None:
            channel.receive()
        imposter.send(bytes(np.arange(50, dtype=np.uint8)))
        with pytest.raises(IncompatibleMetadataError):
            answer(channel, 1)
        channel.close()
        imposter.close()


# ---- the wire alone


@pytest.fixture
def wires():
    """Make both ends of greeted connections."""
    made = []

    def make(producers=None, consumers=None):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            consumer = Wire(socket.create_connection(listener.getsockname()), consumers)
            producer = Wire(listener.accept()[0], producers)
        made.extend((producer, consumer))
        producer.greet()
        while not consumer.reply(b"n" * NAME_NBYTES):
            pass
        while producer.accept() is None:
            pass
        while not consumer.accepted():
            pass
        return producer, consumer

    yield make
    for wire in made:
        wire.close()


def received(wire):
    while (body := wire.receive()) is None:
        pass
    return bytes(body)


@pytest.mark.parametrize("secret", [None, b"s" * 32])
def test_messages_arrive_whole_in_order_and_both_ways(wires, secret):
    producer, consumer = wires(secret, secret)
    sizes = [0, 1, 100, 5000, 68_000, 68_001, 200_000, m.MAX_MESSAGE_NBYTES - 16, 3]
    bodies = [random.Random(n).randbytes(n) for n in sizes]
    got = []
    for body in bodies:
        consumer.send(body)
    while len(got) < len(bodies):
        consumer.flush()
        while (body := producer.receive()) is not None:
            got.append(bytes(body))
    assert got == bodies
    producer.send(b"back")
    assert received(consumer) == b"back"


def test_without_the_secret_there_is_no_connection(wires):
    for producers, consumers in ((b"s" * 32, b"t" * 32), (b"s" * 32, None), (None, b"s" * 32)):
        with pytest.raises(DeniedError):
            wires(producers, consumers)


@pytest.mark.parametrize("attack", ["change", "repeat", "drop", "add"])
def test_between_the_two_nobody_can_change_repeat_drop_or_add_a_message(wires, attack):
    producer, consumer = wires(b"s" * 32, b"s" * 32)
    sent = []
    write = Wire._write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "_write", lambda _, data: sent.append(data))
        consumer.send(b"first")
        consumer.send(b"second")
    first, second = sent
    attacks = {
        "change": [first[:4] + b"F" + first[5:]],
        "repeat": [first, first],
        "drop": [second],
        "add": [first, (5).to_bytes(4, "little") + b"third"],
    }
    for data in attacks[attack]:
        write(consumer, data)
    with pytest.raises(WireError, match="tag"):
        while True:
            received(producer)


def test_a_name_that_nobody_has_is_a_lost_peer_and_blocks_nobody(channels):
    start_s = time.monotonic()
    channel = channels.take("no-such-host.invalid:1234")
    assert time.monotonic() - start_s < 2
    with pytest.raises(PeerLostError):
        answer(channel, ping(channel), within_s=60)
    channel.close()


def test_a_port_that_connects_to_itself_is_nobody():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    connecting = Connecting(f"127.0.0.1:{port}")
    itself = socket.socket()
    itself.bind(("127.0.0.1", port))
    itself.setblocking(False)
    connecting._socket = itself
    with pytest.raises(ConnectionRefusedError):
        while connecting.connected() is None:
            pass
    itself.close()


def test_a_neighbour_is_met_without_tcp_unless_it_is_another_users(server, monkeypatch):
    for uid, family in ((os.getuid(), socket.AF_UNIX), (os.getuid() + 1, socket.AF_INET)):
        monkeypatch.setattr(os, "getuid", lambda uid=uid: uid)
        connecting = Connecting(server.address)
        while (connected := connecting.connected()) is None:
            pass
        assert connected.family == family
        connected.close()


def test_no_descriptor_left_is_said_at_the_consumer(channels, server, monkeypatch):
    def none_left(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("omni_connector_core.onesided.sockets.socket.socket", none_left)
    with pytest.raises(BackendUnavailableError, match="no file descriptor is left"):
        channels.take(server.address)


def test_no_descriptor_left_is_got_over_at_the_producer(server, producer, channels, caplog):
    class NoneLeft:
        def accept(self):
            raise OSError(24, "Too many open files")

    listeners = server._listener._listeners
    there = dict(listeners)
    listeners.update(dict.fromkeys(there, NoneLeft()))
    channel = channels.take(server.address)
    number = ask(channel, "k")
    deadline = Deadline(30)
    while "cannot accept" not in caplog.text:
        assert not deadline.expired()
        channel.receive()
    listeners.update(there)
    producer.put("k")
    assert isinstance(answer(channel, number), m.Found | m.Pending)
    channels.put_back(channel)

"""The consumer's end of the control channel: a pool of DEALER sockets for each producer's address.

A channel belongs to one operation at a time and is driven by the thread that runs it, so an answer wakes that thread and no other.
ZMQ reconnects by itself; a socket monitor says at once when a connection was lost or refused.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from enum import Enum, auto
from typing import TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import IncompatibleMetadataError, PeerLostError, TransferTimeoutError, error_from_code
from omni_connector_core.onesided import messages as m
from omni_connector_core.onesided.sockets import new_socket

__all__ = ["Channel", "Channels", "Link", "wait_on"]

AnswerT = TypeVar("AnswerT", bound="m.Endpoint | m.Truths | m.Count | m.Pong")

_DENIALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
_EVENTS |= _DENIALS[0] | _DENIALS[1] | _DENIALS[2]


_REFUSED_S = 0.5
"""For how long connections are refused before the peer counts as gone, seconds: right after a cut is healed they still are."""


class Link(Enum):
    """What is known of the connection under a channel."""

    CONNECTING = auto()
    """Nothing yet."""
    UP = auto()
    """The peer's control server answered the handshake."""
    REFUSED = auto()
    """Nobody listens at that address, now."""
    DENIED = auto()
    """Somebody listens who does not know the secret, or does not speak ZMQ."""


class Channel:
    """One DEALER socket to one producer."""

    def __init__(self, address: str, secret: bytes | None) -> None:
        self.address = address
        self.link = Link.CONNECTING
        self.ups = 0
        """How often a connection was established: what was sent over an earlier one may be lost."""
        self.confirmed_s = 0.0
        """When the latest message that the producer is known to have received was sent (monotonic clock)."""
        self.socket = new_socket(zmq.DEALER, address, secret)
        self.socket.identity = secrets.token_bytes(16)
        self.socket.reconnect_ivl = 20  # ms
        self.socket.reconnect_ivl_max = 500
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        self.poller = zmq.Poller()
        """Waits for this channel alone."""
        self.poller.register(self.socket, zmq.POLLIN)
        self.poller.register(self.monitor, zmq.POLLIN)
        self._sent: dict[int, float] = {}
        self._last_sent_s = 0.0
        self._silent_since_s: float | None = None
        self._refused_since_s = 0.0
        self.socket.connect(f"tcp://{address}")

    def send(self, question: m.Question) -> None:
        """Send a question; never blocks."""
        now = time.monotonic()
        try:
            self.socket.send(m.encode(question), zmq.NOBLOCK)
        except zmq.Again as error:
            raise PeerLostError(f"the producer at {self.address} reads no messages") from error
        self._last_sent_s = now
        if not isinstance(question, m.Cancel | m.Done):
            self._sent[question.number] = now
            if self._silent_since_s is None:
                self._silent_since_s = now

    def receive(self) -> m.Answer | None:
        """Return the next answer that is here, or None.

        Raises
        ------
        IncompatibleMetadataError
            The producer speaks another version of the protocol.
        """
        try:
            raw = self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            self._look_at_link()
            return None
        try:
            answer = m.decode_answer(raw)
        except m.ProtocolError as error:
            raise IncompatibleMetadataError(
                f"the process at {self.address} answered what is no answer: {error}",
                hint="Install the same omni-connector-core on both sides of the edge",
            ) from error
        self.link = Link.UP
        self._silent_since_s = None
        sent_s = self._sent.pop(answer.number, None)
        if sent_s is not None:
            self.confirmed_s = max(self.confirmed_s, sent_s)
        return answer

    def answers(self) -> Iterator[m.Answer]:
        """Return every answer that is here; raises what `receive` does."""
        while (answer := self.receive()) is not None:
            yield answer

    def tend(self, claims: list[int]) -> None:
        """Say that we live, when it is time to."""
        if time.monotonic() - self._last_sent_s >= m.PING_S:
            self.send(m.Ping(m.new_number(), claims))

    @property
    def reachable(self) -> bool:
        """Whether what is sent may arrive; also true of a connection that was made without our having heard of it yet."""
        return self.link in (Link.CONNECTING, Link.UP)

    @property
    def silent_s(self) -> float:
        """For how long a question has been without any answer, seconds."""
        return 0.0 if self._silent_since_s is None else time.monotonic() - self._silent_since_s

    @property
    def lease_s(self) -> float:
        """For how long the claims of this channel are certain to stand, seconds; negative: not certain."""
        return self.confirmed_s + m.LEASE_S - time.monotonic()

    def lost(self) -> PeerLostError | None:
        """Return the error to raise when the peer was there, or should be, and is not; ask when `receive` found nothing."""
        if self.link is Link.DENIED:
            return PeerLostError(
                f"the process at {self.address} refused the handshake",
                hint="Give both sides the same secret_file, and check that the address is a producer's control address",
            )
        if self.link is Link.REFUSED and time.monotonic() - self._refused_since_s > _REFUSED_S:
            return PeerLostError(f"nobody listens at {self.address} any more")
        if self.silent_s > m.LOST_S:
            return PeerLostError(f"the producer at {self.address} has not answered for {self.silent_s:.1f} s")
        return None

    def _look_at_link(self) -> None:
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.link = Link.UP
                self.ups += 1
            elif event in _DENIALS:
                self.link = Link.DENIED
            elif event == zmq.EVENT_DISCONNECTED:
                if self.link is not Link.DENIED:
                    self.link = Link.CONNECTING
            elif self.link is Link.CONNECTING or self.link is Link.UP:
                self.link = Link.REFUSED
                self._refused_since_s = time.monotonic()

    def close(self, linger_s: float = 0.5) -> None:
        """Close the socket; what was sent still goes out when the peer is there."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=int(linger_s * 1000) if self.reachable else 0)


class Channels:
    """Lends channels; a returned one is lent again. Thread-safe."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._idle: dict[str, list[Channel]] = defaultdict(list)
        self._closed = False

    def take(self, address: str) -> Channel:
        """Lend a channel to an address; give it to `put_back` or close it."""
        while True:
            with self._lock:
                idle = self._idle[address]
                channel = idle.pop() if idle else None
            if channel is None:
                return Channel(address, self._secret)
            try:
                while channel.receive() is not None:  # late answers to questions that nobody asks any more
                    pass
            except IncompatibleMetadataError:
                channel.close()
            else:
                if channel.link is Link.UP:
                    return channel
                channel.close()

    def put_back(self, channel: Channel) -> None:
        """Take a channel back; one that lost its peer, or waits for an answer, is closed."""
        if channel.link is Link.UP and not channel.silent_s:
            with self._lock:
                if not self._closed:
                    self._idle[channel.address].append(channel)
                    return
        channel.close()

    def call(self, address: str, question: m.Question, answer: type[AnswerT], deadline: Deadline) -> AnswerT:
        """Ask one question that is answered at once.

        Raises
        ------
        PeerLostError, TransferTimeoutError, and what the producer answers
        """
        channel = self.take(address)
        try:
            channel.send(question)
            while True:
                got = channel.receive()
                if isinstance(got, answer) and got.number == question.number:
                    return got
                if isinstance(got, m.Failed):
                    raise error_from_code(got.code, got.message)
                if got is not None:
                    continue
                if (lost := channel.lost()) is not None:
                    raise lost
                if deadline.expired():
                    raise TransferTimeoutError(f"{address} did not answer within {deadline.timeout_s:g} s")
                wait_on([channel], deadline.at_s)
        finally:
            self.put_back(channel)

    def close(self) -> None:
        """Close the idle channels, and each lent one when it comes back."""
        with self._lock:
            self._closed = True
            idle = [channel for channels in self._idle.values() for channel in channels]
            self._idle.clear()
        for channel in idle:
            channel.close()


def wait_on(channels: list[Channel], until_s: float, fd: int | None = None) -> None:
    """Sleep until a channel has an answer or news of its connection, or `fd` is readable; at most `PING_S`.

    Parameters
    ----------
    until_s
        Wake up then at the latest, on the monotonic clock.
    """
    if len(channels) == 1 and fd is None:
        poller = channels[0].poller
    else:
        poller = zmq.Poller()
        for channel in channels:
            poller.register(channel.socket, zmq.POLLIN)
            poller.register(channel.monitor, zmq.POLLIN)
        if fd is not None:
            poller.register(fd, zmq.POLLIN)
    poller.poll(max(math.ceil(min(until_s - time.monotonic(), m.PING_S) * 1000), 1))

"""The consumer's end of the control channel: a pool of connections for each producer's address.

A channel belongs to one operation at a time and is driven by the thread that runs it, so an answer wakes that thread and no
other. It connects anew by itself, whenever it is looked at and it is time to.
"""

from __future__ import annotations

import math
import secrets
import select
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from enum import Enum, auto
from typing import TypeVar

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import IncompatibleMetadataError, PeerLostError, TransferTimeoutError, error_from_code
from omni_connector_core.onesided import messages as m
from omni_connector_core.onesided.sockets import Connecting, raise_if_exhausted
from omni_connector_core.onesided.wire import NAME_NBYTES, DeniedError, Wire

__all__ = ["Channel", "Channels", "Link", "wait_on"]

AnswerT = TypeVar("AnswerT", bound="m.Endpoint | m.Truths | m.Count | m.Pong")

_REFUSED_S = 0.5
"""For how long connections are refused before the peer counts as gone, seconds: right after a cut is healed they still are."""

_FIRST_RETRY_S, _LAST_RETRY_S = 0.02, 0.5
"""A connection that failed is made anew after so long, twice as long each time, seconds."""

_MAX_UNSENT_NBYTES = 8 << 20
"""A producer that leaves more than this unread is lost."""


class Link(Enum):
    """What is known of the connection under a channel."""

    CONNECTING = auto()
    """Nothing yet."""
    UP = auto()
    """The peer's control server answered the handshake."""
    REFUSED = auto()
    """Nobody listens at that address, now."""
    DENIED = auto()
    """Somebody listens who does not know the secret, or does not speak our protocol."""


class Channel:
    """One connection to one producer, made again when it is lost."""

    def __init__(self, address: str, secret: bytes | None) -> None:
        self.address = address
        self.link = Link.CONNECTING
        self.confirmed_s = 0.0
        """When the latest message that the producer is known to have received was sent (monotonic clock)."""
        self._secret = secret
        self._name = secrets.token_bytes(NAME_NBYTES)
        self._connecting: Connecting | None = None
        self._wire: Wire | None = None
        self._replied = False
        self._ups = 0
        self._queue: list[bytes] = []
        self._retry_at_s = 0.0
        self._retry_s = _FIRST_RETRY_S
        self._sent: dict[int, float] = {}
        self._last_sent_s = 0.0
        self._silent_since_s: float | None = None
        self._refused_since_s = 0.0
        self._go_on()

    @property
    def epoch(self) -> int:
        """Over which connection, counted from 1, what was sent last went or goes; what went over an earlier one may be lost."""
        return self._ups if self._replied else self._ups + 1

    def send(self, question: m.Question) -> None:
        """Send a question over this connection or, when it is lost, the next; never blocks."""
        now = time.monotonic()
        body = m.encode(question)
        if self._wire is not None and self._replied:
            try:
                self._wire.send(body)
            except OSError:
                self._disconnected()
                self._queue.append(body)
            else:
                if self._wire.unsent > _MAX_UNSENT_NBYTES:
                    raise PeerLostError(f"the producer at {self.address} reads no messages")
        else:
            self._queue.append(body)
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
        if self.link is not Link.UP:
            self._go_on()
        if self._wire is None or self.link is not Link.UP:
            return None
        try:
            if self._wire.unsent:
                self._wire.flush()
            raw = self._wire.receive()
        except OSError:
            self._disconnected()
            return None
        if raw is None:
            return None
        try:
            answer = m.decode_answer(raw)
        except m.ProtocolError as error:
            raise IncompatibleMetadataError(
                f"the process at {self.address} answered what is no answer: {error}",
                hint="Install the same omni-connector-core on both sides of the edge",
            ) from error
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
    def ended(self) -> bool:
        """Whether the other side ended the connection; looked up without reading from it."""
        return self._wire is None or self._wire.ended

    @property
    def reachable(self) -> bool:
        """Whether what is sent may arrive."""
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

    def settle(self, seconds: float) -> None:
        """Make sure that what was sent is out: at once, unless the connection was lost or is full, else within so long."""
        until_s = time.monotonic() + seconds
        while self.reachable and (self._wire is None or self.link is not Link.UP or self._wire.unsent):
            if time.monotonic() >= until_s:
                return
            wait_on([self], until_s)
            self.receive()

    def close(self) -> None:
        """Close the connection; what was sent over it still goes out."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        if self._connecting is not None:
            self._connecting.close()
            self._connecting = None

    # ---- waiting

    @property
    def waits_for(self) -> tuple[int, int] | None:
        """Descriptor and events (of `select.poll`) that bring news; None: only time does."""
        if self._wire is not None:
            return self._wire.fileno(), select.POLLIN | (select.POLLOUT if self._wire.unsent else 0)
        if self._connecting is not None and self._connecting.fileno() >= 0:
            return self._connecting.fileno(), select.POLLOUT
        return None

    @property
    def due_s(self) -> float:
        """When it wants to be looked at though nothing came (monotonic clock)."""
        if self._wire is not None or self.link is Link.DENIED:
            return math.inf
        return self._retry_at_s if self._connecting is None else self._connecting.due_s

    # ---- the connection

    def _go_on(self) -> None:
        """Go on with connecting and the handshake, as far as is possible now."""
        if self.link is Link.DENIED:
            return
        try:
            if self._wire is None:
                if self._connecting is None:
                    if time.monotonic() < self._retry_at_s:
                        return
                    self._connecting = Connecting(self.address)
                connection = self._connecting.connected()
                if connection is None:
                    return
                self._connecting = None
                self._wire = Wire(connection, self._secret)
            if not self._replied:
                if not self._wire.reply(self._name):
                    return
                self._replied = True
                self._ups += 1
                while self._queue:
                    self._wire.send(self._queue.pop(0))
            if self._wire.accepted():
                self.link = Link.UP
                self._retry_s = _FIRST_RETRY_S
        except DeniedError:
            self.close()
            self.link = Link.DENIED
        except OSError as error:
            raise_if_exhausted(error)
            refused = self._wire is None
            self._disconnected()
            if refused and self.link is not Link.REFUSED:
                self.link = Link.REFUSED
                self._refused_since_s = time.monotonic()

    def _disconnected(self) -> None:
        self.close()
        self._replied = False
        self._retry_at_s = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
        if self.link is Link.UP:
            self.link = Link.CONNECTING
            self._retry_at_s = 0.0


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
                if not idle:
                    del self._idle[address]
            if channel is None:
                self._sweep()
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

    def _sweep(self) -> None:
        """Close the idle channels whose producer has gone; a new channel is where the time for that is."""
        with self._lock:
            for address, idle in list(self._idle.items()):
                for channel in [channel for channel in idle if channel.ended]:
                    idle.remove(channel)
                    channel.close()
                if not idle:
                    del self._idle[address]

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
    poll = select.poll()
    now = time.monotonic()
    until_s = min(until_s, now + m.PING_S)
    for channel in channels:
        if (waits_for := channel.waits_for) is not None:
            poll.register(*waits_for)
        until_s = min(until_s, channel.due_s)
    if fd is not None:
        poll.register(fd, select.POLLIN)
    poll.poll(max(math.ceil((until_s - now) * 1000), 0))

"""A consumer's way from a key to memory.

`Fetch` holds the whole protocol in the order in which it happens: find who has the payload, claim it, read it, make sure that
the claim stood, say done. It is a generator: wherever it would have to wait it yields a function that waits, so a blocking get, a poll
that never blocks, and a handle between the two run the same code. Ending it in the middle (by an error thrown in, or by `close`)
undoes what was begun: questions are cancelled, the claim goes back unread, memory under a running transfer into quarantine.

One get that finds its payload costs 2 messages and 1 engine read before it returns and 1 message after; it wakes the producer's
control thread twice, and copies nothing but by the read itself. A small frame comes with the answer and needs no read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_any
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from omni_connector_core import memcpy
from omni_connector_core.arena import Region
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import (
    AmbiguousKeyError,
    BackendUnavailableError,
    DecodeError,
    OmniConnectorError,
    PeerLostError,
    TransferTimeoutError,
    error_from_code,
)
from omni_connector_core.frame import PREFIX_NBYTES, FrameLayout, scatter_plan
from omni_connector_core.key import Key
from omni_connector_core.metadata import Where
from omni_connector_core.onesided import messages as m
from omni_connector_core.onesided.channel import Channel, Channels, Link, wait_on
from omni_connector_core.onesided.discovery import Watch
from omni_connector_core.onesided.engine import Piece
from omni_connector_core.onesided.hub import Share, Transfer
from omni_connector_core.onesided.producers import Producers, Whereabouts

__all__ = ["Fetch", "Span"]

AnyT = TypeVar("AnyT")

_HEAD_NBYTES = 4096
"""What is read of a frame to learn its layout, at first."""

_ATTEMPTS = 3
"""How often a read is begun anew while the producer's control server says that it is well."""

_SHORT_S = 1e-3
"""For how long a poll may wait for an answer that is due, seconds."""

_MARGIN_S = 1.0
"""A claim counts as certain while it has at least this long to live, seconds."""

_GONE_S = 5.0
"""For how long an abandoned read into the caller's own memory is waited for, seconds."""


class Pause(NamedTuple):
    """A point at which the protocol waits.

    Attributes
    ----------
    block
        Waits until something may have changed, or to a point of the monotonic clock.
    short
        Whether it is over within a millisecond when all is well; a poll waits for nothing else.
    """

    block: Callable[[float], object]
    short: bool


Steps = Generator[Pause, None, AnyT]

Span = tuple[int, int]
"""A piece of the caller's memory: address and length in bytes."""


@dataclass(slots=True)
class _Candidate:
    """A producer that was asked for the key."""

    where: Whereabouts
    channel: Channel
    ask: m.Ask
    ups: int
    answer: m.Found | m.Pending | OmniConnectorError | None = None
    absent: bool = False

    @property
    def undecided(self) -> bool:
        """Whether it has yet to say something."""
        return self.answer is None and not self.absent


class Fetch:
    """One read of one payload.

    Parameters
    ----------
    producers, channels, share
        The consumer's; the last is asked for when it is needed.
    key, where
        What to look for.
    target
        None: read into the arena; the result is the frame's memory. Else: the raw buffers go there; the result is how many bytes.
    """

    def __init__(
        self,
        producers: Producers,
        channels: Channels,
        share: Callable[[], Share],
        key: Key,
        where: Where,
        target: Sequence[Span] | None = None,
    ) -> None:
        self._producers = producers
        self._channels = channels
        self._share = share
        self._key = key
        self.where = where
        self._target = target
        self._asked: list[_Candidate] = []
        self._steps = self._run()

    # ---- how it is driven

    def finish(self, deadline: Deadline, check: Callable[[], None]) -> Any:
        """Go on to the end, waiting.

        Parameters
        ----------
        check
            Called after every wait; what it raises ends the fetch.

        Raises
        ------
        TransferTimeoutError, CapacityError
            The deadline passed.
        OmniConnectorError
            What `Transport.get` raises.
        """
        until_s = max(deadline.at_s, time.monotonic() + _SHORT_S)
        error: OmniConnectorError | None = None
        try:
            while True:
                pause = next(self._steps) if error is None else self._steps.throw(error)
                error = None
                try:
                    if time.monotonic() >= until_s:
                        raise TransferTimeoutError(f"not there after {deadline.timeout_s:g} s")
                    pause.block(until_s)
                    check()
                except OmniConnectorError as raised:
                    error = raised
        except StopIteration as end:
            return end.value

    def advance(self) -> Any | None:
        """Go on as far as is possible without a wait worth the name; None when that was not to the end."""
        until_s = time.monotonic() + _SHORT_S
        error: OmniConnectorError | None = None
        try:
            while True:
                pause = next(self._steps) if error is None else self._steps.throw(error)
                error = None
                if not pause.short or time.monotonic() >= until_s:
                    return None
                try:
                    pause.block(until_s)
                except OmniConnectorError as raised:
                    error = raised
        except StopIteration as end:
            return end.value

    def cancel(self) -> None:
        """Give up what was begun."""
        self._steps.close()

    # ---- the protocol

    def _run(self) -> Steps[Any]:
        try:
            chosen, found = yield from self._find()
        except BaseException:
            for candidate in self._asked:
                self._leave(candidate)
            raise
        channel = chosen.channel
        unread = True
        try:
            result = yield from self._read(channel, found)
            unread = False
            return result
        finally:
            if channel.link is Link.UP:
                channel.send(m.Done(m.new_number(), found.claim, unread))
            self._channels.put_back(channel)

    def _find(self) -> Steps[tuple[_Candidate, m.Found]]:
        """Ask everyone who may hold the key until exactly one has given it to us."""
        self._ask_new()
        watch: Watch | None = None
        try:
            while True:
                for candidate in self._asked:
                    self._listen(candidate)
                holding = [c for c in self._asked if isinstance(c.answer, m.Found)]
                if not any(c.undecided for c in self._asked):
                    if len(holding) > 1:
                        names = " and by ".join(sorted(str(c.where) for c in holding))
                        raise AmbiguousKeyError(f"held by {names}")
                    for chosen in holding:
                        for candidate in self._asked:
                            if candidate is not chosen:
                                self._leave(candidate)
                        assert isinstance(chosen.answer, m.Found)
                        return chosen, chosen.answer
                    self._raise_if_hopeless()
                    if watch is None and self.where.at is None:
                        watch = self._producers.take_watch()
                        self._ask_new()
                        continue
                yield self._until_news(watch)
                if watch is not None and watch.changed():
                    self._ask_new()
        finally:
            if watch is not None:
                self._producers.put_back_watch(watch)

    def _ask_new(self) -> None:
        known = {candidate.where for candidate in self._asked}
        for where in self._producers.find(self.where):
            if where in known:
                continue
            channel = self._channels.take(where.address)
            for news in self._producers.news_for(where):
                channel.send(news)
            ask = m.Ask(m.new_number(), self._producers.scope, self._key, where.instance, where.producer)
            self._asked.append(_Candidate(where, channel, ask, channel.ups))
            channel.send(ask)

    def _listen(self, candidate: _Candidate) -> None:
        """Take in what a candidate says, or what its silence says."""
        channel = candidate.channel
        if isinstance(candidate.answer, m.Found | OmniConnectorError):
            return
        while (answer := channel.receive()) is not None:
            if answer.number != candidate.ask.number:
                continue
            if isinstance(answer, m.Failed):
                candidate.answer = error_from_code(answer.code, answer.message)
                return
            assert isinstance(answer, m.Found | m.Pending)
            candidate.answer, candidate.absent = answer, False
            if isinstance(answer, m.Found):
                return
        if channel.ups > candidate.ups:  # a new connection: what was said over the old one may be lost
            if candidate.ups:
                channel.send(candidate.ask)
            candidate.ups = channel.ups
        lost = channel.lost()
        if lost is None:
            channel.tend([])
        elif candidate.where.certain or candidate.answer is not None or channel.link is Link.DENIED:
            candidate.answer = lost
        else:
            candidate.absent = True

    def _raise_if_hopeless(self) -> None:
        """Raise when nobody holds the key and nobody will."""
        endings = [c.answer for c in self._asked if isinstance(c.answer, OmniConnectorError)]
        for error in endings:
            if not isinstance(error, PeerLostError):
                raise error
        if endings and len(endings) == len(self._asked):
            raise endings[0]

    def _until_news(self, watch: Watch | None) -> Pause:
        channels = [c.channel for c in self._asked if not isinstance(c.answer, m.Found | OmniConnectorError)]
        fd = None if watch is None else watch.fd
        return Pause(
            lambda until_s: wait_on(channels, until_s, fd), short=any(candidate.undecided for candidate in self._asked)
        )

    def _leave(self, candidate: _Candidate) -> None:
        """Stop asking a candidate; a read that it gave us, or gives us when it wakes up, goes to whoever asks next."""
        channel = candidate.channel
        if channel.link is Link.UP:
            channel.send(m.Cancel(candidate.ask.number))
        self._channels.put_back(channel)

    # ---- from claim to memory

    def _read(self, channel: Channel, found: m.Found) -> Steps[Any]:
        if found.frame:
            return self._unpack(found.frame)
        if self._target is None:
            region = yield from self._read_start(channel, found, found.nbytes)
            try:
                yield from self._make_sure(channel, found)
            except BaseException:
                self._share().arena.release(region)
                raise
            return region.lease()
        pieces = yield from self._plan(channel, found, self._target)
        if pieces:
            yield from self._transfer(channel, found, lambda: self._nothing(pieces))
        yield from self._make_sure(channel, found)
        return sum(piece.nbytes for piece in pieces)

    def _unpack(self, frame: bytes) -> Any:
        """Take a frame that came with the answer."""
        if self._target is None:
            return memcpy.aligned_copy(frame)
        source = memcpy.region(frame).address
        pieces = scatter_plan(FrameLayout.parse_head(frame), [length for _, length in self._target])
        for offset, index, start, length in pieces:
            memcpy.copy(self._target[index][0] + start, source + offset, length)
        return sum(length for _, _, _, length in pieces)

    def _read_start(self, channel: Channel, found: m.Found, nbytes: int) -> Steps[Region]:
        """Read the first bytes of the frame, or all of it, into the arena."""

        def prepare() -> Steps[tuple[Region | None, list[Piece]]]:
            region = yield from self._allocate(channel, found, nbytes)
            return region, [Piece(found.address, region.address, nbytes)]

        region = yield from self._transfer(channel, found, prepare)
        assert region is not None
        return region

    def _plan(self, channel: Channel, found: m.Found, target: Sequence[Span]) -> Steps[list[Piece]]:
        """Say which bytes of the frame go where in the caller's memory, from the frame's head."""
        head_nbytes, nbytes = PREFIX_NBYTES, 0
        while nbytes < head_nbytes:
            nbytes = min(max(head_nbytes, _HEAD_NBYTES), found.nbytes)
            region = yield from self._read_start(channel, found, nbytes)
            head = bytes(region.buffer())
            self._share().arena.release(region)
            head_nbytes, _ = FrameLayout.parse_prefix(head)
            if head_nbytes > found.nbytes:
                raise DecodeError(f"a head of {head_nbytes} bytes in a frame of {found.nbytes}")
        plan = scatter_plan(FrameLayout.parse_head(head), [length for _, length in target])
        return [
            Piece(found.address + offset, target[index][0] + start, length) for offset, index, start, length in plan
        ]

    @staticmethod
    def _nothing(pieces: list[Piece]) -> Steps[tuple[Region | None, list[Piece]]]:
        """Prepare nothing: the memory is the caller's."""
        return None, pieces
        yield  # a generator, as `prepare` is

    def _transfer(
        self,
        channel: Channel,
        found: m.Found,
        prepare: Callable[[], Steps[tuple[Region | None, list[Piece]]]],
    ) -> Steps[Region | None]:
        """Read pieces of the payload; begin anew while the engine fails and the producer says that it is well.

        Parameters
        ----------
        prepare
            Gets memory of the arena, if the pieces go there, and the pieces. Once for every attempt, as the memory of one that
            failed is in quarantine.
        """
        hub, arena = self._share()
        name = found.endpoint
        for attempt in range(1, _ATTEMPTS + 1):
            region, pieces = yield from prepare()
            transfer = None
            try:
                while transfer is None:
                    yield from self._contact(channel, found, name)
                    transfer = hub.start(name, pieces)
                while not transfer.done():
                    self._news(channel, found)
                    yield Pause(partial(_wait_transfer, transfer), short=True)
                return region
            except BaseException as error:
                if transfer is None:
                    if region is not None:
                        arena.release(region)
                else:
                    gone = transfer.abandon(region)
                    if region is None:
                        gone.wait(_GONE_S)  # nothing may arrive in the caller's memory once we return
                if not isinstance(error, PeerLostError | BackendUnavailableError) or attempt == _ATTEMPTS:
                    raise
                failure = error
            try:
                endpoint = yield from self._describe(channel, found)
            except PeerLostError as lost:
                raise lost from failure
            name = endpoint.name
        raise AssertionError("unreachable")

    def _allocate(self, channel: Channel, found: m.Found, nbytes: int) -> Steps[Region]:
        arena = self._share().arena
        while (region := arena.try_allocate(nbytes)) is None:
            self._news(channel, found)
            try:
                yield Pause(partial(arena.wait, nbytes), short=False)
            except TransferTimeoutError as error:
                raise arena.full(nbytes) from error
        return region

    def _contact(self, channel: Channel, found: m.Found, name: str) -> Steps[None]:
        """Have the engine meet the producer's engine, if it has not."""
        hub = self._share().hub
        contact = hub.peer(name)
        if contact is None:
            endpoint = yield from self._describe(channel, found)
            contact = hub.connect(name, endpoint.blob)
        while not contact.done():
            self._news(channel, found)
            yield Pause(partial(_wait_contact, contact), short=True)
        contact.result()

    def _describe(self, channel: Channel, found: m.Found) -> Steps[m.Endpoint]:
        question = m.Describe(m.new_number(), self._producers.scope)
        channel.send(question)
        while True:
            for answer in self._news(channel, found):
                if answer.number == question.number:
                    if isinstance(answer, m.Failed):
                        raise error_from_code(answer.code, answer.message)
                    assert isinstance(answer, m.Endpoint)
                    return answer
            yield Pause(partial(wait_on, [channel]), short=True)

    def _make_sure(self, channel: Channel, found: m.Found) -> Steps[None]:
        """Make sure that the claim stood while we read; else the memory may have been used for something else meanwhile.

        Without a word to the producer when what it last confirmed is recent enough.
        """
        if channel.lease_s > _MARGIN_S:
            return
        ping = m.Ping(m.new_number(), [found.claim])
        channel.send(ping)
        while True:
            for answer in self._answers(channel):
                if isinstance(answer, m.Pong) and answer.number == ping.number:
                    if found.claim in answer.claims:
                        return
                    raise PeerLostError("the producer took us for dead while we read, and gave the payload up")
            if (lost := channel.lost()) is not None:
                raise lost
            yield Pause(partial(wait_on, [channel]), short=True)

    def _news(self, channel: Channel, found: m.Found) -> list[m.Answer]:
        """Return what the producer said, tell it that we live, and see whether it does."""
        answers = list(self._answers(channel))
        channel.tend([found.claim])
        if channel.link is Link.REFUSED or channel.silent_s > m.LEASE_S:
            lost = channel.lost()
            if lost is not None:
                raise lost
        return answers

    @staticmethod
    def _answers(channel: Channel) -> Generator[m.Answer, None, None]:
        while (answer := channel.receive()) is not None:
            yield answer


def _wait_transfer(transfer: Transfer, until_s: float) -> None:
    transfer.wait(min(until_s, time.monotonic() + m.PING_S))


def _wait_contact(contact: Future[Any], until_s: float) -> None:
    wait_for_any([contact], max(min(until_s - time.monotonic(), m.PING_S), 0.0))

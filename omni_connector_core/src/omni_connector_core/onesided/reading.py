"""A consumer's way from a claim to memory: the engine's read, and everything that can go wrong with it.

Like `Fetch`, of which it is the second half, it is a generator that yields wherever it would have to wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_any
from functools import partial
from typing import Any, NamedTuple, TypeVar

from omni_connector_core import memcpy
from omni_connector_core.arena import Region
from omni_connector_core.errors import (
    BackendUnavailableError,
    DecodeError,
    PeerLostError,
    TransferTimeoutError,
    error_from_code,
)
from omni_connector_core.frame import PREFIX_NBYTES, FrameLayout, scatter_plan
from omni_connector_core.onesided import messages as m
from omni_connector_core.onesided.channel import Channel, Link, wait_on
from omni_connector_core.onesided.engine import Piece
from omni_connector_core.onesided.hub import Share, Transfer

__all__ = ["LapsedError", "Pause", "Reading", "Span", "Steps"]

AnyT = TypeVar("AnyT")

_HEAD_NBYTES = 4096
"""What is read of a frame to learn its layout, at first."""

_ATTEMPTS = 3
"""How often a read is begun anew while the producer's control server says that it is well."""

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


class LapsedError(Exception):
    """The producer took us for dead, and gave what we had claimed to whoever asks next: ask again."""


class Reading:
    """The read of one payload that was claimed.

    Parameters
    ----------
    share
        The connector's; asked for when it is needed.
    channel
        On which the claim was made.
    found
        The claim.
    target
        None: read into the arena; the result is the frame's memory. Else: the raw buffers go there; the result is how many bytes.
    """

    def __init__(
        self,
        share: Callable[[], Share],
        channel: Channel,
        found: m.Found,
        target: Sequence[Span] | None,
    ) -> None:
        self._share = share
        self._channel = channel
        self._found = found
        self._target = target

    def run(self) -> Steps[Any]:
        """Read it."""
        if self._found.frame:
            yield from self._make_sure()
            return self._unpack(self._found.frame)
        if self._target is None:
            region = yield from self._read_start(self._found.nbytes)
            try:
                yield from self._make_sure()
            except BaseException:
                self._share().arena.release(region)
                raise
            return region.lease()
        pieces = yield from self._plan(self._target)
        if pieces:
            yield from self._transfer(lambda: self._nothing(pieces))
        yield from self._make_sure()
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

    def _read_start(self, nbytes: int) -> Steps[Region]:
        """Read the first bytes of the frame, or all of it, into the arena."""

        def prepare() -> Steps[tuple[Region | None, list[Piece]]]:
            region = yield from self._allocate(nbytes)
            return region, [Piece(self._found.address, region.address, nbytes)]

        region = yield from self._transfer(prepare)
        assert region is not None
        return region

    def _plan(self, target: Sequence[Span]) -> Steps[list[Piece]]:
        """Say which bytes of the frame go where in the caller's memory, from the frame's head."""
        head_nbytes, nbytes = PREFIX_NBYTES, 0
        while nbytes < head_nbytes:
            nbytes = min(max(head_nbytes, _HEAD_NBYTES), self._found.nbytes)
            region = yield from self._read_start(nbytes)
            head = bytes(region.buffer())
            self._share().arena.release(region)
            head_nbytes, _ = FrameLayout.parse_prefix(head)
            if head_nbytes > self._found.nbytes:
                raise DecodeError(f"a head of {head_nbytes} bytes in a frame of {self._found.nbytes}")
        plan = scatter_plan(FrameLayout.parse_head(head), [length for _, length in target])
        return [
            Piece(self._found.address + offset, target[index][0] + start, length)
            for offset, index, start, length in plan
        ]

    @staticmethod
    def _nothing(pieces: list[Piece]) -> Steps[tuple[Region | None, list[Piece]]]:
        """Prepare nothing: the memory is the caller's."""
        return None, pieces
        yield  # a generator, as `prepare` is

    def _transfer(self, prepare: Callable[[], Steps[tuple[Region | None, list[Piece]]]]) -> Steps[Region | None]:
        """Read pieces of the payload; begin anew while the engine fails and the producer says that it is well.

        Parameters
        ----------
        prepare
            Gets memory of the arena, if the pieces go there, and the pieces. Once for every attempt, as the memory of one that
            failed is in quarantine.
        """
        hub, arena = self._share()
        name = self._found.endpoint
        for attempt in range(1, _ATTEMPTS + 1):
            region, pieces = yield from prepare()
            transfer = None
            try:
                while transfer is None:
                    yield from self._contact(name)
                    transfer = hub.start(name, pieces)
                while not transfer.done():
                    self._news()
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
                endpoint = yield from self._describe()
            except PeerLostError as lost:
                raise lost from failure
            name = endpoint.name
        raise AssertionError("unreachable")

    def _allocate(self, nbytes: int) -> Steps[Region]:
        arena = self._share().arena
        while (region := arena.try_allocate(nbytes)) is None:
            self._news()
            try:
                yield Pause(partial(arena.wait, nbytes), short=False)
            except TransferTimeoutError as error:
                raise arena.full(nbytes) from error
        return region

    def _contact(self, name: str) -> Steps[None]:
        """Have the engine meet the producer's engine, if it has not."""
        hub = self._share().hub
        contact = hub.peer(name)
        if contact is None:
            endpoint = yield from self._describe()
            contact = hub.connect(name, endpoint.blob)
        while not contact.done():
            self._news()
            yield Pause(partial(_wait_contact, contact), short=True)
        contact.result()

    def _describe(self) -> Steps[m.Endpoint]:
        answer = yield from self._answer(m.Describe(m.new_number(), self._found.claim))
        assert isinstance(answer, m.Endpoint)
        return answer

    def _answer(self, question: m.Describe | m.Ping) -> Steps[m.Answer]:
        """Ask, and ask again over every new connection, until there is an answer."""
        channel = self._channel
        channel.send(question)
        epoch = channel.epoch
        while True:
            for answer in self._news():
                if answer.number == question.number:
                    if isinstance(answer, m.Failed):
                        raise error_from_code(answer.code, answer.message)
                    return answer
            if channel.epoch > epoch:
                channel.send(question)
                epoch = channel.epoch
            yield Pause(partial(wait_on, [channel]), short=True)

    def _make_sure(self) -> Steps[None]:
        """Make sure that the claim stood while we read; else the memory may have been used for something else meanwhile.

        Without a word to the producer when what it last confirmed is recent enough, and it has not ended the connection.

        Raises
        ------
        LapsedError
        """
        if self._channel.lease_s > _MARGIN_S and not self._channel.ended:
            return
        pong = yield from self._answer(m.Ping(m.new_number(), [self._found.claim]))
        if not (isinstance(pong, m.Pong) and self._found.claim in pong.claims):
            raise LapsedError

    def _news(self) -> list[m.Answer]:
        """Return what the producer said, tell it that we live, and see whether it does."""
        answers = list(self._channel.answers())
        self._channel.tend([self._found.claim])
        if self._channel.link is Link.REFUSED or self._channel.silent_s > m.LEASE_S:
            lost = self._channel.lost()
            if lost is not None:
                raise lost
        return answers


def _wait_transfer(transfer: Transfer, until_s: float) -> None:
    transfer.wait(min(until_s, time.monotonic() + m.PING_S))


def _wait_contact(contact: Future[Any], until_s: float) -> None:
    wait_for_any([contact], max(min(until_s - time.monotonic(), m.PING_S), 0.0))

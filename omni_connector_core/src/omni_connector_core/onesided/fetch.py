"""A consumer's way from a key to memory.

`Fetch` holds the whole protocol in the order in which it happens: find who has the payload, claim it, read it, make sure that
the claim stood, say done. It is a generator: wherever it would have to wait it yields a function that waits, so a blocking get, a poll
that never blocks, and a handle between the two run the same code. Ending it in the middle (by an error thrown in, or by `close`)
undoes what was begun: questions are cancelled, the claim goes back unread, memory under a running transfer into quarantine.

One get that finds its payload costs 2 messages and 1 engine read before it returns and 1 message after; it wakes the producer's
control thread twice, and copies nothing but by the read itself. A get that waits was asked before: between the put and its
payload lies 1 message, from the putting thread to the getting one. A small frame comes with the answer and needs no read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import (
    AmbiguousKeyError,
    OmniConnectorError,
    PeerLostError,
    TransferTimeoutError,
    error_from_code,
)
from omni_connector_core.key import Key
from omni_connector_core.metadata import Where
from omni_connector_core.onesided import messages as m
from omni_connector_core.onesided.channel import Channel, Channels, Link, wait_on
from omni_connector_core.onesided.discovery import Watch
from omni_connector_core.onesided.hub import Share
from omni_connector_core.onesided.producers import Producers, Whereabouts
from omni_connector_core.onesided.reading import LapsedError, Pause, Reading, Span, Steps

__all__ = ["Fetch"]

_SHORT_S = 1e-3
"""For how long a poll may wait for an answer that is due, seconds."""


_SETTLE_S = 0.5
"""For how long a get that has its payload makes sure that the producer hears of it, when the connection was lost, seconds."""


@dataclass(slots=True)
class _Candidate:
    """A producer that was asked for the key."""

    where: Whereabouts
    channel: Channel
    ask: m.Ask
    epoch: int
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
        while True:
            try:
                return (yield from self._once())
            except LapsedError:
                self._asked.clear()

    def _once(self) -> Steps[Any]:
        try:
            chosen, found = yield from self._find()
        except BaseException:
            for candidate in self._asked:
                self._leave(candidate)
            raise
        channel = chosen.channel
        unread = True
        try:
            result = yield from Reading(self._share, channel, found, self._target).run()
            unread = False
            return result
        finally:
            if channel.reachable:
                channel.send(m.Done(m.new_number(), found.claim, unread))
                channel.settle(_SETTLE_S)
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
            channel.send(ask)
            self._asked.append(_Candidate(where, channel, ask, channel.epoch))

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
        if channel.epoch > candidate.epoch:  # the connection was lost, and the question maybe with it
            channel.send(candidate.ask)
            candidate.epoch = channel.epoch
        lost = channel.lost()
        if lost is None:
            channel.tend([])
        elif candidate.where.certain or candidate.answer is not None or channel.link is Link.DENIED:
            candidate.answer = lost
            self._producers.lost(candidate.where)
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
        if channel.reachable:
            channel.send(m.Cancel(candidate.ask.number))
        self._channels.put_back(channel)

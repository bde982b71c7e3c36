"""The consumer's end: it asks producers for keys and takes what they say is there.

It has no thread of its own (see `leader`), so a payload wakes the thread that wants it and no other, and an idle end costs
nothing.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import (
    BackendUnavailableError,
    OmniConnectorError,
    PeerLostError,
    RequestAbandonedError,
    TransferTimeoutError,
    error_from_code,
)
from omni_connector_core.key import Key, Producer
from omni_connector_core.recent import Recent
from omni_connector_shared_memory import protocol
from omni_connector_shared_memory.channel import ChannelEnd
from omni_connector_shared_memory.interest import SILENCE_S, Claimed, Interest, Target
from omni_connector_shared_memory.leader import Events, LeaderFollowers
from omni_connector_shared_memory.link import Link
from omni_connector_shared_memory.meeting import Address, Meeting
from omni_connector_shared_memory.neighbours import Neighbours

__all__ = ["ConsumerEnd"]

FIRST_ANSWER_S = 1e-3
"""How long the first poll of a key waits for the producer to say whether it is there."""
ANSWER_S = 1.0
"""How long `exists` waits for a producer."""
MESSAGES_AT_ONCE = 16
LOOK_S = 0.01
"""How often a poll asks the system for news, such as a producer that died, though nobody has said anything."""


class ConsumerEnd:
    """What one consuming process knows of the producers of one edge. Thread-safe.

    Parameters
    ----------
    meeting
        Where producers are found.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._wait = LeaderFollowers(self._handle)
        self._lock = self._wait.lock
        self._neighbours = Neighbours(meeting, self._greet)
        self._opened = False
        self._look_at_s = 0.0
        self._number = 0
        self._interests: dict[Key, Interest] = {}
        self._waiting: dict[Key, int] = {}
        self._lookups: dict[int, Interest] = {}
        self._ripe_at_s = math.inf
        self._calls: dict[int, dict[Link, Any]] = {}
        self._abandoned: Recent[str, None] = Recent()

    # ---- what a transport asks for

    def get(self, target: Target, deadline: Deadline) -> Claimed:
        """Wait for a payload and claim it.

        Raises
        ------
        TransferTimeoutError, and what `poll` raises
        """
        with self._lock:
            self._open()
            outcome = self._outcome(target)
            try:
                if outcome is None:
                    outcome = self._wait_for(target, deadline)
            finally:
                self._drop(target)
            if outcome is None:
                absent = self._neighbours.absent(target)
                raise TransferTimeoutError(f"not there after {deadline.timeout_s:g} s{absent}")
            if isinstance(outcome, OmniConnectorError):
                raise outcome
            return outcome

    def poll(self, target: Target) -> Claimed | None:
        """Claim a payload if it is there; the first poll of a target asks, and waits a moment for the answer.

        Raises
        ------
        ProducerFailedError, RequestAbandonedError, PayloadExpiredError, PeerLostError, AmbiguousKeyError
        """
        with self._lock:
            self._open()
            interest = self._interests.get(target.key)
            if interest is None:
                self._look()
            elif not interest.found:
                self._glance()
            outcome = self._outcome(target, answer=True)
            if outcome is None and (interest := self._interests[target.key]).silent:
                self._wait.until(lambda: not interest.silent or None, Deadline(FIRST_ANSWER_S))
                outcome = self._outcome(target)
            if outcome is not None:
                self._drop(target)
            if isinstance(outcome, OmniConnectorError):
                raise outcome
            return outcome

    def news(self) -> int:
        """A number that changes when something may have come, and from time to time."""
        answered = sum([link.answered for link in tuple(self._neighbours.links.values())])
        return answered + (int(time.monotonic() / LOOK_S) << 16)

    def expect(self, targets: Sequence[Target]) -> None:
        """Ask for several targets that will be polled soon; waits for nothing."""
        with self._lock:
            self._open()
            interests = [self._interest(target) for target in targets]
            for link in tuple(self._neighbours.links.values()):
                self._ask(link, [interest for interest in interests if interest.wants(link)])

    def forget(self, target: Target) -> None:
        """Wait for a target no longer; a claim on it goes back."""
        with self._lock:
            self._drop(target)

    def exists(self, keys: Sequence[Key], producer: Producer | None) -> list[bool]:
        """Ask producers which payloads are there; one that does not answer soon counts as holding none."""
        flags = [False] * len(keys)
        deadline = Deadline(ANSWER_S)
        for first in range(0, len(keys), protocol.KEYS_PER_MESSAGE):
            some: list[protocol.PackedKey] = list(keys[first : first + protocol.KEYS_PER_MESSAGE])
            answers = self._call(partial(_presence, some), deadline, producer)
            for answer in answers:
                for index, flag in enumerate(answer or ()):
                    flags[first + index] |= flag
        return flags

    def cleanup(self, request_id: str, deadline: Deadline) -> int:
        """End a request at every producer, those that come later too; how many unread payloads that discarded.

        Raises
        ------
        TransferTimeoutError
            A producer did not answer; it has been told all the same.
        """
        with self._lock:
            self._open()
            self._look()  # before the request is in the book: whom we find now is asked, and counts
            self._abandoned.note(request_id, None)
            for key in [key for key in self._interests if key.request_id == request_id]:
                for target in tuple(self._interests[key].targets):
                    self._drop(target)
        answers = self._call(lambda call: protocol.Cleanup(call, request_id), deadline)
        if None in answers:
            raise TransferTimeoutError(f"a producer did not answer within {deadline.timeout_s:g} s")
        return sum(answers)

    def ping(self, deadline: Deadline) -> int:
        """Ask every producer for a sign of life; how many there are.

        Raises
        ------
        TransferTimeoutError
            One does not answer.
        """
        answers = self._call(protocol.Ping, deadline)
        if None in answers:
            raise TransferTimeoutError(f"a producer did not answer within {deadline.timeout_s:g} s")
        return len(answers)

    def held_nbytes(self, except_of: Address) -> int:
        """Bytes of producers' memory that views keep, one producer's excepted."""
        with self._lock:
            return sum(link.held_nbytes for link in self._neighbours.links.values() if link.address != except_of)

    def close(self) -> None:
        """Leave all producers; who waits gets `ClosedError`."""
        self._wait.stop()
        with self._lock:  # those who waited give up what they waited for
            self._interests.clear()
            self._lookups.clear()
            self._neighbours.close()
            self._wait.close()

    def abandon(self) -> None:
        """In a forked child: close the parent's files, taking no lock."""
        self._neighbours.abandon()
        self._wait.close()

    # ---- producers; with the lock held

    def _open(self) -> None:
        """Find the producers, at the first use."""
        try:
            epoll = self._wait.open()
        except OSError as error:
            raise BackendUnavailableError(
                f"no files to wait for can be opened: {error.strerror}", hint="Raise the limit on open files"
            ) from error
        if not self._opened:
            self._neighbours.open(epoll)
            self._opened = True

    def _greet(self, link: Link) -> None:
        """Tell a new producer what it ought to know."""
        self._abandoned.forget_old(time.monotonic())
        for request_id in self._abandoned:
            link.channel.send(protocol.Cleanup(self._numbers(1), request_id))
        self._ask(link, [interest for interest in self._interests.values() if interest.wants(link)])
        for interest in self._interests.values():
            if link in interest.asked:
                # with one producer nobody had to say that it does not hold a key; now it matters
                for other in interest.asked.keys() - interest.silent - {link}:
                    interest.silent.add(other)
                    other.channel.send(protocol.Confirm([interest.asked[other]]))

    def _part(self, link: Link) -> None:
        """Note that a producer is gone."""
        self._neighbours.part(link)
        error = link.refusal or PeerLostError(
            f"{link.address} {'closed its end' if link.said_goodbye else 'died'}, and no other is here"
        )
        for interest in self._interests.values():
            if link in interest.asked:
                del self._lookups[interest.asked[link]]
                interest.answered(link, error)
        for answers in self._calls.values():
            if link in answers and answers[link] is None:
                del answers[link]
        # another may be here already, which is then asked; one that refuses us is tried again by the next who asks
        self._neighbours.look_around(but=link.address if link.refusal else None)

    def _look(self) -> None:
        """Take in what has come, news of other producers included."""
        self._look_at_s = time.monotonic() + LOOK_S
        self._wait.look()
        self._neighbours.look_seldom()

    def _glance(self) -> None:
        """Take in what has come from producers that are known; no system call when nothing has."""
        if time.monotonic() >= self._look_at_s:
            self._look()
            return
        news = [link for link in self._neighbours.links.values() if link.has_news]
        for link in news:
            self._read(link)
        if news and (self._waiting or self._calls):  # it may be theirs, and they sleep on the sockets that we read
            self._wait.stir()

    # ---- interests; with the lock held

    def _interest(self, target: Target) -> Interest:
        interest = self._interests.get(target.key)
        if interest is None:
            interest = self._interests[target.key] = Interest(target.key)
        interest.targets.add(target)
        return interest

    def _ask(self, link: Link, interests: list[Interest], *, answer: bool = False) -> None:
        answer = answer or len(self._neighbours.links) > 1
        for start in range(0, len(interests), protocol.KEYS_PER_MESSAGE):
            some = interests[start : start + protocol.KEYS_PER_MESSAGE]
            first = self._numbers(len(some))
            for lookup, interest in enumerate(some, first):
                interest.asked[link] = lookup
                self._lookups[lookup] = interest
                if answer:
                    interest.silent.add(link)
            keys: list[protocol.PackedKey] = [interest.key for interest in some]
            link.channel.send(protocol.Lookup(first, keys, answer))

    def _numbers(self, count: int) -> int:
        """Return the first of some numbers that name lookups and calls."""
        first = self._number + 1
        self._number += count
        return first

    def _outcome(self, target: Target, *, answer: bool = False) -> Claimed | OmniConnectorError | None:
        """Return what has become of a target, None while that is open; asks for it if nobody has."""
        if self._abandoned:
            abandoned = self._abandoned.get(target.key.request_id)
            if abandoned is not None and abandoned[0] > time.monotonic():
                return RequestAbandonedError("the request was cleaned up")
        interest = self._interest(target)
        outcome = interest.outcome(target)
        if outcome is None:
            for link in tuple(self._neighbours.links.values()):
                if interest.wants(link):
                    self._ask(link, [interest], answer=answer)
            if not interest.asked:
                return self._neighbours.hopeless(target)
        return outcome

    def _wait_for(self, target: Target, deadline: Deadline) -> Claimed | OmniConnectorError | None:
        key = target.key
        self._waiting[key] = self._waiting.get(key, 0) + 1
        try:
            return self._wait.until(partial(self._outcome, target), deadline, self._look_again_s)
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]

    def _drop(self, target: Target) -> None:
        """Forget a target: cancel it where it was asked for, give back what was found."""
        interest = self._interests.get(target.key)
        if interest is None:
            return
        interest.targets.discard(target)
        if interest.asked:
            for link in [link for link in interest.asked if not interest.means(link)]:
                lookup = interest.asked.pop(link)
                interest.silent.discard(link)
                del self._lookups[lookup]
                link.channel.send(protocol.Cancel([lookup]))
        if interest.found:
            for link in [link for link in interest.found if not interest.means(link)]:
                link.give_back(interest.found.pop(link))
        if not interest.targets:
            del self._interests[target.key]
        if target.key in self._waiting:  # another thread, which has to ask for itself now
            self._wait.stir()

    # ---- what producers say; with the lock held

    def _look_again_s(self) -> float | None:
        """After how long something may be had that no message tells of."""
        seldom_s = self._neighbours.look_seldom()
        if self._ripe_at_s == math.inf:
            return seldom_s
        ripe_s = self._ripe_at_s - time.monotonic()
        if ripe_s <= 0:
            self._ripe_at_s = math.inf
        return max(ripe_s, 1e-3)

    def _handle(self, events: Events) -> None:
        for fd, event in events:
            link = self._neighbours.links.get(fd)
            if link is None:
                self._neighbours.noticed(fd)
            elif event == select.EPOLLOUT:
                link.channel.flush()
            else:
                self._read(link)

    def _read(self, link: Link) -> None:
        try:
            for _ in range(MESSAGES_AT_ONCE):
                message = link.receive()
                if message is None:
                    return
                self._understand(link, message)
                if not self._lookups:  # nothing more is on its way: spare the system call that says so
                    return
        except (ChannelEnd, msgspec.DecodeError, RecursionError):
            self._part(link)

    def _understand(self, link: Link, message: protocol.ToConsumer) -> None:
        match message:
            case protocol.Found(finds):
                for find in finds:
                    interest = self._lookups.pop(find.lookup, None)
                    if interest is None:  # cancelled meanwhile
                        link.give_back(find)
                    else:
                        interest.answered(link, find)
                        if interest.silent:
                            self._ripe_at_s = time.monotonic() + SILENCE_S
            case protocol.Waiting(lookups):
                for lookup in lookups:
                    if lookup in self._lookups:
                        self._lookups[lookup].answered(link, None)
            case protocol.Ended(lookup, code, text):
                interest = self._lookups.pop(lookup, None)
                if interest is not None:
                    interest.answered(link, error_from_code(code, text))
            case protocol.Here(call, answer) | protocol.Done(call, answer):
                if call in self._calls and link in self._calls[call]:
                    self._calls[call][link] = answer
            case protocol.Bye():
                link.said_goodbye = True

    # ---- questions to all producers

    def _call(
        self, message: Callable[[int], protocol.ToProducer], deadline: Deadline, producer: Producer | None = None
    ) -> list[Any]:
        """Ask all producers, or one; their answers, None for each that did not answer in time."""
        with self._lock:
            self._open()
            self._look()
            call = self._numbers(1)
            answers: dict[Link, Any] = {
                link: None for link in self._neighbours.links.values() if producer in (None, link.address.producer)
            }
            self._calls[call] = answers
            try:
                for link in answers:
                    link.channel.send(message(call))
                self._wait.until(lambda: all(answer is not None for answer in answers.values()) or None, deadline)
            finally:
                del self._calls[call]
            return list(answers.values())


def _presence(keys: list[protocol.PackedKey], call: int) -> protocol.Presence:
    return protocol.Presence(call, keys)

"""The consumer's end: it asks producers for keys and takes what they say is there.

It has no thread. Of the threads that wait, one (the leader) reads what producers send, for all; when it has what it waits
for, another takes over. So a payload wakes the thread that wants it and no other, and an idle end costs nothing.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import (
    AmbiguousKeyError,
    ClosedError,
    OmniConnectorError,
    PeerLostError,
    RequestAbandonedError,
    TransferTimeoutError,
    error_from_code,
)
from omni_connector_core.key import Key, Producer
from omni_connector_core.ledger import MEMORY_OF_ENDINGS_S

from omni_connector_shared_memory import protocol
from omni_connector_shared_memory.channel import ChannelEnd
from omni_connector_shared_memory.interest import Claimed, Interest, Target
from omni_connector_shared_memory.link import Link
from omni_connector_shared_memory.meeting import Address, Meeting
from omni_connector_shared_memory.watch import FolderWatch

__all__ = ["ConsumerEnd"]

FIRST_ANSWER_S = 1e-3
"""How long the first poll of a key waits for the producer to say whether it is there."""
ANSWER_S = 1.0
"""How long `exists` waits for a producer."""
MESSAGES_AT_ONCE = 16

ResultT = TypeVar("ResultT")


class ConsumerEnd:
    """What one consuming process knows of the producers of one edge. Thread-safe.

    Parameters
    ----------
    meeting
        Where producers are found.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._leading = False
        self._closed = False
        self._number = 0
        self._links: dict[int, Link] = {}
        self._lost: set[Address] = set()
        self._refused: dict[Address, OmniConnectorError] = {}
        self._interests: dict[Target, Interest] = {}
        self._lookups: dict[int, Interest] = {}
        self._calls: dict[int, dict[Link, Any]] = {}
        self._abandoned: dict[str, float] = {}
        self._epoll: select.epoll | None = None
        self._watch: FolderWatch | None = None
        self._wake = -1

    # ---- what a transport asks for

    def get(self, target: Target, deadline: Deadline) -> Claimed:
        """Wait for a payload and claim it.

        Raises
        ------
        TransferTimeoutError, and what `poll` raises
        """
        with self._lock:
            self._open()
            try:
                claimed = self._until(lambda: self._settle(target), deadline)
            except BaseException:
                self._drop(target)
                raise
            if claimed is None:
                self._drop(target)
                raise TransferTimeoutError(self._why_not(target, deadline))
            return claimed

    def poll(self, target: Target) -> Claimed | None:
        """Claim a payload if it is there; the first poll of a target asks, and waits a moment for the answer.

        Raises
        ------
        ProducerFailedError, RequestAbandonedError, PayloadExpiredError, PeerLostError, AmbiguousKeyError
        """
        with self._lock:
            self._open()
            known = self._interests.get(target)
            if known is None:
                interest = self._interest(target, answer=True)
                self._until(lambda: not interest.silent or None, Deadline(FIRST_ANSWER_S))
            elif known.ripe_in_s() is None and known.error is None and not self._leading:
                self._handle(self._require_epoll().poll(0))
            return self._settle(target)

    def expect(self, targets: Sequence[Target]) -> None:
        """Ask for several targets that will be polled soon; waits for nothing."""
        with self._lock:
            self._open()
            fresh = [Interest(target) for target in targets if target not in self._interests]
            for interest in fresh:
                self._interests[interest.target] = interest
            for link in tuple(self._links.values()):
                self._ask(link, [interest for interest in fresh if interest.wants(link)])

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
            now = time.monotonic()
            self._abandoned = {name: until_s for name, until_s in self._abandoned.items() if until_s > now}
            self._abandoned[request_id] = now + MEMORY_OF_ENDINGS_S
            for target in [target for target in self._interests if target.key.request_id == request_id]:
                self._drop(target)
            self._changed.notify_all()
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
            return sum(link.held_nbytes for link in self._links.values() if link.address != except_of)

    def close(self) -> None:
        """Leave all producers; who waits gets `ClosedError`."""
        with self._lock:
            self._closed = True
            if self._epoll is None or self._watch is None:
                return
            os.eventfd_write(self._wake, 1)
            self._changed.notify_all()
            while self._leading:
                self._changed.wait()
            for link in self._links.values():
                link.retire()
            self._links.clear()
            self._watch.close()
            self._epoll.close()
            os.close(self._wake)

    def abandon(self) -> None:
        """In a forked child: close the parent's files, taking no lock."""
        if self._epoll is None or self._watch is None or self._closed:
            return
        for link in tuple(self._links.values()):
            link.abandon()
        self._watch.close()
        self._epoll.close()
        os.close(self._wake)

    # ---- producers; with the lock held

    def _open(self) -> None:
        """Find the producers, at the first use."""
        if self._epoll is not None:
            return
        if self._closed:
            raise ClosedError("the connector is closed")
        self._meeting.open()
        self._watch = FolderWatch(self._meeting.folder)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        if self._watch.fd >= 0:
            self._epoll.register(self._watch.fd, select.EPOLLIN)
        self._look_around()

    def _require_epoll(self) -> select.epoll:
        if self._closed or self._epoll is None:
            raise ClosedError("the connector was closed meanwhile")
        return self._epoll

    def _look_around(self) -> None:
        """Connect to producers that are new."""
        known = {link.address for link in self._links.values()}
        for address in self._meeting.addresses():
            if address not in known:
                self._connect(address)

    def _connect(self, address: Address) -> None:
        self._refused.pop(address, None)
        try:
            sock = self._meeting.connect(address)
        except PeerLostError:
            self._lost.add(address)
            self._meeting.sweep()
            return
        except OmniConnectorError as error:
            self._refused[address] = error
            return
        self._lost = {lost for lost in self._lost if lost.producer != address.producer}
        link = Link(address, sock, self._require_epoll())
        several = bool(self._links)
        self._links[link.fd] = link
        now = time.monotonic()
        for request_id, until_s in self._abandoned.items():
            if until_s > now:
                link.channel.send(protocol.Cleanup(self._numbers(1), request_id))
        self._ask(link, [interest for interest in self._interests.values() if interest.wants(link)])
        if several:  # with one producer nobody had to say that it does not hold a key; now it matters
            for interest in self._interests.values():
                for other, lookup in interest.asked.items():
                    if other is not link and not interest.found:
                        interest.silent.add(other)
                        self._send_lookup(other, lookup, [interest], answer=True)

    def _part(self, link: Link) -> None:
        """Note that a producer is gone."""
        del self._links[link.fd]
        if not link.said_goodbye:
            self._lost.add(link.address)
        if link.refusal is not None:
            self._refused[link.address] = link.refusal
        for interest in tuple(self._interests.values()):
            if link in interest.asked:
                self._lookups.pop(interest.asked[link], None)
                interest.lost(link)
                if interest.error is None and not interest.found and not interest.asked:
                    interest.error = link.refusal or PeerLostError(
                        f"{link.address} {'closed its end' if link.said_goodbye else 'died'}"
                    )
        for answers in self._calls.values():
            if link in answers and answers[link] is None:
                del answers[link]
        link.retire()

    # ---- interests; with the lock held

    def _interest(self, target: Target, *, answer: bool = False) -> Interest:
        interest = self._interests.get(target)
        if interest is None:
            interest = self._interests[target] = Interest(target)
            for link in tuple(self._links.values()):
                if interest.wants(link):
                    self._ask(link, [interest], answer=answer)
        return interest

    def _ask(self, link: Link, interests: list[Interest], *, answer: bool = False) -> None:
        answer = answer or len(self._links) > 1
        for start in range(0, len(interests), protocol.KEYS_PER_MESSAGE):
            some = interests[start : start + protocol.KEYS_PER_MESSAGE]
            first = self._numbers(len(some))
            for lookup, interest in enumerate(some, first):
                interest.asked[link] = lookup
                self._lookups[lookup] = interest
                if answer:
                    interest.silent.add(link)
            self._send_lookup(link, first, some, answer=answer)

    def _numbers(self, count: int) -> int:
        """Return the first of some numbers that name lookups and calls."""
        first = self._number + 1
        self._number += count
        return first

    def _send_lookup(self, link: Link, first: int, interests: list[Interest], *, answer: bool) -> None:
        keys: list[protocol.PackedKey] = [interest.target.key for interest in interests]
        link.channel.send(protocol.Lookup(first, keys, answer))

    def _settle(self, target: Target) -> Claimed | None:
        """Return the claim on a target that is decided, raise its error, or return None; asks for it if nobody has."""
        if self._abandoned.get(target.key.request_id, 0.0) > time.monotonic():
            self._drop(target)
            raise RequestAbandonedError("the request was cleaned up")
        interest = self._interest(target)
        if interest.found:
            if interest.ripe_in_s():
                return None
            if len(interest.found) > 1:
                names = " and by ".join(map(str, sorted(claimed.link.address for claimed in interest.found)))
                self._drop(target)
                raise AmbiguousKeyError(
                    f"held by {names}", hint="Pass the metadata, or producer=, to say whose is meant"
                )
            claimed = interest.found.pop()
            self._drop(target)
            return claimed
        if interest.error is not None:
            error = interest.error
            self._drop(target)
            raise error
        if not interest.asked:
            self._check_lost(target)
        return None

    def _check_lost(self, target: Target) -> None:
        """Nobody who lives can be asked: raise if waiting makes no sense."""
        refusals = [error for address, error in self._refused.items() if target.means(address)]
        lost = [address for address in self._lost if target.means(address)]
        if not (refusals or lost or target.incarnation):
            return
        self._look_around()  # the news of another one may not have been read yet
        if self._interests[target].asked:
            return
        self._drop(target)
        if refusals:
            raise refusals[0]
        who = " and ".join(map(str, sorted(lost))) or f"{target.producer} ({target.incarnation})"
        raise PeerLostError(f"{who} died or left, and no other is here")

    def _drop(self, target: Target) -> None:
        """Forget a target: cancel it where it was asked for, give back what was found."""
        interest = self._interests.pop(target, None)
        if interest is None:
            return
        for link, lookup in interest.asked.items():
            if self._lookups.pop(lookup, None) is not None:
                link.channel.send(protocol.Cancel([lookup]))
        for claimed in interest.found:
            claimed.link.give_back(claimed.found)

    def _why_not(self, target: Target, deadline: Deadline) -> str:
        reason = f"not there after {deadline.timeout_s:g} s"
        if not self._links:
            reason += f"; no producer of this edge has appeared in {self._meeting.folder}"
        elif not any(target.means(link.address) for link in self._links.values()):
            reason += f"; {target.producer} has not appeared"
        return reason

    # ---- waiting; with the lock held

    def _until(self, done: Callable[[], ResultT | None], deadline: Deadline) -> ResultT | None:
        """Read messages, or wait while another thread does, until `done` says something; None at the deadline."""
        while (result := done()) is None:
            pause_s = deadline.remaining_s()
            if not pause_s:
                return None
            epoll = self._require_epoll()
            assert self._watch is not None
            for limit_s in (self._watch.seldom_s, self._soonest_s()):
                pause_s = pause_s if limit_s is None else min(pause_s, limit_s)
            if self._leading:
                self._changed.wait(pause_s)
                continue
            self._leading = True
            self._lock.release()
            try:
                events = epoll.poll(pause_s)
            finally:
                self._lock.acquire()
                self._leading = False
                self._changed.notify_all()
            self._handle(events)
            if self._watch.seldom_s is not None:
                self._look_around()
        return result

    def _soonest_s(self) -> float | None:
        """Seconds until something that was found may be taken though not all producers have answered."""
        ripe = (interest.ripe_in_s() for interest in self._interests.values() if interest.found)
        return min((in_s for in_s in ripe if in_s is not None), default=None)

    def _handle(self, events: list[tuple[int, int]]) -> None:
        assert self._watch is not None
        for fd, event in events:
            link = self._links.get(fd)
            if link is None:
                if fd == self._watch.fd:
                    self._watch.clear()
                    self._look_around()
                continue
            if event & select.EPOLLOUT:
                link.channel.flush()
            if event & ~select.EPOLLOUT:
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
        except (ChannelEnd, msgspec.DecodeError):
            self._part(link)

    def _understand(self, link: Link, message: protocol.ToConsumer) -> None:
        match message:
            case protocol.Found(lookup):
                interest = self._lookups.pop(lookup, None)
                if interest is None:  # cancelled meanwhile
                    link.give_back(message)
                else:
                    interest.answered(link, message)
            case protocol.Waiting(lookups):
                for lookup in lookups:
                    if lookup in self._lookups:
                        self._lookups[lookup].answered(link)
            case protocol.Ended(lookup, code, text):
                interest = self._lookups.pop(lookup, None)
                if interest is not None:
                    self._end(interest, link, error_from_code(code, text))
            case protocol.Here(call, answer) | protocol.Done(call, answer):
                if call in self._calls and link in self._calls[call]:
                    self._calls[call][link] = answer
            case protocol.Bye():
                link.said_goodbye = True
            case protocol.Refused():
                self._part(link)
            case protocol.Welcome():
                pass

    def _end(self, interest: Interest, link: Link, error: OmniConnectorError) -> None:
        """Note that a producer will not give what is wanted; only one that closes leaves hope in the others."""
        interest.lost(link)
        if not (isinstance(error, PeerLostError) and interest.asked) and interest.error is None:
            interest.error = error

    # ---- questions to all producers

    def _call(
        self, message: Callable[[int], protocol.ToProducer], deadline: Deadline, producer: Producer | None = None
    ) -> list[Any]:
        """Ask all producers, or one; their answers, None for each that did not answer in time."""
        with self._lock:
            self._open()
            call = self._numbers(1)
            answers: dict[Link, Any] = {
                link: None for link in self._links.values() if producer in (None, link.address.producer)
            }
            self._calls[call] = answers
            try:
                for link in tuple(answers):
                    link.channel.send(message(call))
                self._until(lambda: all(answer is not None for answer in answers.values()) or None, deadline)
            finally:
                del self._calls[call]
            return list(answers.values())


def _presence(keys: list[protocol.PackedKey], call: int) -> protocol.Presence:
    return protocol.Presence(call, keys)

"""The producer's side of one consumer: what it waits for, and which memory it holds."""

from __future__ import annotations

import threading
from functools import partial
from typing import NamedTuple

from omni_connector_core.errors import CapacityError, OmniConnectorError
from omni_connector_core.key import Key
from omni_connector_core.ledger import Claim, Ledger
from omni_connector_shared_memory import protocol
from omni_connector_shared_memory.board import Board
from omni_connector_shared_memory.channel import Channel
from omni_connector_shared_memory.pool import Pool

__all__ = ["Connection", "Slot"]

MESSAGES_AT_ONCE = 64


class Slot(NamedTuple):
    """Where a payload lies in the pool, and whether several consumers may read it."""

    offset: int
    shared: bool


class Connection:
    """One consumer. `reclaim` and deliveries come from any thread, the rest from the server's.

    Parameters
    ----------
    channel
        The consumer's socket.
    ledger
        The producer's book.
    """

    def __init__(self, channel: Channel, ledger: Ledger[Slot]) -> None:
        self.channel = channel
        self._board = Board()
        self._ledger = ledger
        self._lock = threading.Lock()
        self._waiting: dict[int, Key] = {}
        self._claims: dict[int, int] = {}
        self._gone = False

    def serve(self) -> None:
        """Answer what the consumer sent.

        Raises
        ------
        ChannelEnd
            It is gone.
        msgspec.DecodeError
            It does not speak our protocol.
        """
        for _ in range(MESSAGES_AT_ONCE):
            data = self.channel.receive()
            if data is None:
                return
            self._answer(protocol.decode_at_producer(data))

    def reclaim(self) -> None:
        """End the claims whose memory the consumer released; no system call."""
        # whoever holds the lock is about to do the same, or to add claims that are not released yet
        if not self._claims or not self._lock.acquire(blocking=False):
            return
        try:
            numbers = [self._withdraw(ticket) for ticket in self._board.released()]
        finally:
            self._lock.release()
        for number in numbers:
            self._ledger.release(number)

    def end(self) -> None:
        """End everything that the consumer waits for or holds: it is gone."""
        with self._lock:
            self._gone = True
            waiting, claims = self._waiting, self._claims
            self._waiting, self._claims = {}, {}
            seen = {number: self._board.seen(ticket) for ticket, number in claims.items()}
        for lookup, key in waiting.items():
            self._ledger.cancel(key, (self, lookup))
        for number, was_seen in seen.items():
            self._ledger.release(number, unread=not was_seen)
        self.close()

    def want(self, wanted: bool) -> None:
        """Ask the consumer to tell of the next release, or no longer."""
        with self._lock:
            if not self._gone:
                self._board.want(wanted)

    def welcome(self, pool: Pool) -> None:
        """Give the consumer what it needs.

        Raises
        ------
        ChannelEnd
            It is gone.
        """
        welcome = protocol.Welcome(protocol.VERSION, pool.capacity_nbytes)
        self.channel.send_files(welcome, (pool.fd, self._board.fd))

    def close(self) -> None:
        """Close the socket and the board."""
        with self._lock:
            self._gone = True
            self._claims = {}
            self.channel.close()
            self._board.close()

    def abandon(self) -> None:
        """Close the files in a forked child, taking no lock."""
        self.channel.abandon()
        self._board.close()

    def _answer(self, message: protocol.ToProducer) -> None:
        match message:
            case protocol.Lookup():
                self._look_up(message)
            case protocol.Confirm(lookups):
                self.channel.send(protocol.Waiting(lookups))
            case protocol.Cancel(lookups):
                self._cancel(lookups)
            case protocol.Unread(tickets):
                self._give_back(tickets)
            case protocol.Released():
                self.reclaim()
            case protocol.Presence(call, keys):
                self._ledger.sweep_if_due()
                self.channel.send(protocol.Here(call, [self._ledger.exists(Key(*key)) for key in keys]))
            case protocol.Cleanup(call, request_id):
                self.channel.send(protocol.Done(call, self._ledger.cleanup(request_id)))
            case protocol.Ping(call):
                self.channel.send(protocol.Done(call, 0))
            case protocol.Leave():
                self._leave()

    def _look_up(self, message: protocol.Lookup) -> None:
        finds, waiting = [], []
        for lookup, packed in enumerate(message.keys, message.first):
            key = Key(*packed)
            self._waiting[lookup] = key
            answer = self._ledger.claim(key, (self, lookup), partial(self._deliver, lookup))
            if answer is None:
                waiting.append(lookup)
            else:
                self._waiting.pop(lookup, None)
                find = self._accept(lookup, answer)
                if find is not None:
                    finds.append(find)
        if finds:
            self.channel.send(protocol.Found(finds))
        if waiting and message.answer:
            self.channel.send(protocol.Waiting(waiting))

    def _deliver(self, lookup: int, answer: Claim[Slot] | OmniConnectorError) -> None:
        """Tell the consumer what became of a lookup; in the thread that put the payload."""
        self._waiting.pop(lookup, None)
        find = self._accept(lookup, answer)
        if find is not None:
            self.channel.send(protocol.Found([find]))

    def _accept(self, lookup: int, answer: Claim[Slot] | OmniConnectorError) -> protocol.Find | None:
        """Write a claim into the books; None when there is none to tell of, because something went wrong."""
        if isinstance(answer, OmniConnectorError):
            self.channel.send(protocol.Ended(lookup, answer.code, answer.message))
            return None
        slot = answer.item
        with self._lock:
            if not self._gone:
                try:
                    ticket = self._board.issue()
                except CapacityError as error:
                    self.channel.send(protocol.Ended(lookup, error.code, error.message))
                else:
                    self._claims[ticket] = answer.number
                    return protocol.Find(lookup, ticket, slot.offset, answer.nbytes, slot.shared)
        self._ledger.release(answer.number, unread=True)
        return None

    def _cancel(self, lookups: list[int]) -> None:
        for lookup in lookups:
            key = self._waiting.pop(lookup, None)
            if key is not None:
                self._ledger.cancel(key, (self, lookup))

    def _give_back(self, tickets: list[int]) -> None:
        with self._lock:
            numbers = [self._withdraw(ticket) for ticket in tickets if ticket in self._claims]
        for number in numbers:
            self._ledger.release(number, unread=True)

    def _leave(self) -> None:
        self._cancel(list(self._waiting))
        with self._lock:
            unseen = [ticket for ticket in self._claims if not self._board.seen(ticket)]
        self._give_back(unseen)

    def _withdraw(self, ticket: int) -> int:
        self._board.withdraw(ticket)
        return self._claims.pop(ticket)

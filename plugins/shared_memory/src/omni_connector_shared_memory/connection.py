"""The producer's side of one consumer: what it waits for, and which memory it holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import msgspec

from omni_connector_core.claim import Claim
from omni_connector_core.errors import CapacityError, OmniConnectorError
from omni_connector_core.key import Key
from omni_connector_core.ledger import Ledger
from omni_connector_shared_memory import protocol
from omni_connector_shared_memory.board import ANSWERED, ASKED, Board
from omni_connector_shared_memory.channel import Channel
from omni_connector_shared_memory.pool import Block, Pool

__all__ = ["Connection", "Slot"]

MESSAGES_AT_ONCE = 64


class Slot(msgspec.Struct, frozen=True):
    """Where a payload lies in the pool, and whether several consumers may read it."""

    block: Block
    shared: bool


class Connection:
    """One consumer. What concerns claims may be called from any thread, the rest from the server's.

    Parameters
    ----------
    channel
        The consumer's socket.
    ledger
        The producer's book.
    cleanup
        Ends a request at the producer, and says how many payloads that discarded.
    """

    def __init__(self, channel: Channel, ledger: Ledger[Slot], cleanup: Callable[[str], int]) -> None:
        self.channel = channel
        self._cleanup = cleanup
        self._board = Board()
        self._served = 0
        channel.count_in(self._board.bytes, ANSWERED)
        self._ledger = ledger
        self._lock = threading.Lock()
        self._waiting: dict[int, Key] = {}
        self._claims: dict[int, Claim[Slot]] = {}
        self._recalled: set[int] = set()
        """Tickets whose payload was taken back, but of which the consumer may not know yet."""
        self._gone = False

    @property
    def asked(self) -> bool:
        """Whether the consumer has sent something since it was last answered; its first message may not be counted."""
        try:
            return self._board.bytes[ASKED] != self._served
        except ValueError:  # closed meanwhile
            return False

    def serve(self) -> None:
        """Answer what the consumer sent.

        Raises
        ------
        ChannelEnd
            It is gone.
        msgspec.DecodeError
            It does not speak our protocol.
        """
        self._served = self._board.bytes[ASKED]
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
            ended = [] if self._gone else [self._withdraw(ticket) for ticket in self._board.released()]
        finally:
            self._lock.release()
        for claim in ended:
            if claim is not None:
                self._ledger.release(claim.number)

    def mark(self, which: Callable[[Claim[Slot]], bool]) -> dict[int, Claim[Slot]]:
        """Tell the consumer not to take certain payloads that it has not taken yet; returns these, by ticket."""
        with self._lock:
            marked = {
                ticket: claim for ticket, claim in self._claims.items() if which(claim) and not self._board.seen(ticket)
            }
            for ticket in marked:
                self._board.mark(ticket)
            return marked

    def recall(self, marked: dict[int, Claim[Slot]]) -> list[Claim[Slot]]:
        """Take back what was marked a moment ago, unless the consumer was faster: to take it, or to give it back itself.

        In the latter case its ticket may be out again, with another claim and without a mark.
        """
        with self._lock:
            recalled = {
                ticket: claim
                for ticket, claim in marked.items()
                if self._claims.get(ticket) is claim and not self._board.seen(ticket)
            }
            for ticket in recalled:
                del self._claims[ticket]
            self._recalled.update(recalled)
        return list(recalled.values())

    def expires_s(self) -> float | None:
        """When the first payload expires that the consumer has not taken yet (monotonic clock)."""
        with self._lock:
            unseen = (claim.expires_s for ticket, claim in self._claims.items() if not self._board.seen(ticket))
            return min(unseen, default=None)

    def end(self) -> None:
        """End everything that the consumer waits for or holds: it is gone."""
        with self._lock:
            self._gone = True
            waiting, claims = self._waiting, self._claims
            self._waiting, self._claims = {}, {}
            seen = {claim.number: self._board.seen(ticket) for ticket, claim in claims.items()}
        for lookup, key in list(waiting.items()):  # a put may be answering one of them
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
                self.channel.send(protocol.Done(call, self._cleanup(request_id)))
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
                    self._claims[ticket] = answer
                    return protocol.Find(lookup, ticket, slot.block.offset, answer.nbytes, slot.shared)
        self._ledger.release(answer.number, unread=True)
        return None

    def _cancel(self, lookups: list[int]) -> None:
        for lookup in lookups:
            key = self._waiting.pop(lookup, None)
            if key is not None:
                self._ledger.cancel(key, (self, lookup))

    def _give_back(self, tickets: list[int]) -> None:
        with self._lock:
            known = [ticket for ticket in tickets if ticket in self._claims or ticket in self._recalled]
            ended = [self._withdraw(ticket) for ticket in known]
        for claim in ended:
            if claim is not None:
                self._ledger.release(claim.number, unread=True)

    def _leave(self) -> None:
        self._cancel(list(self._waiting))
        with self._lock:
            unseen = [ticket for ticket in self._claims if not self._board.seen(ticket)]
        self._give_back(unseen)

    def _withdraw(self, ticket: int) -> Claim[Slot] | None:
        """Take a ticket back that the consumer has no more use for; its claim, if that was not ended before."""
        self._board.withdraw(ticket)
        self._recalled.discard(ticket)
        return self._claims.pop(ticket, None)

"""The ledger against a naive model: any sequence of puts, reads, releases, failures, cleanups and expiries."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_connector_core import (
    Key,
    PayloadConflictError,
    PayloadExpiredError,
    PeerLostError,
    ProducerFailedError,
    RequestAbandonedError,
)
from omni_connector_core.claim import Claim
from omni_connector_core.deadline import Deadline
from omni_connector_core.ledger import Ledger

KEYS = st.sampled_from([Key("r"), Key("r", 1)])  # few, so that rules meet
SELDOM = st.sampled_from([True, False, False, False])
CLEANED = st.sampled_from(["r", *(f"other-{n}" for n in range(10))])  # seldom, as it is for good
READERS = st.sampled_from(["anne", "bert"])


class Payload:
    """What the model knows of one put."""

    def __init__(self, item: int, reads: int) -> None:
        self.item, self.reads, self.out, self.dropped, self.frozen = item, reads, 0, False, False


class LedgerModel(RuleBasedStateMachine):
    """Each rule does one thing to both and compares what came of it."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.ledger: Ledger[int] = Ledger(self.freed.append)
        self.payloads: dict[int, Payload] = {}
        self.live: dict[Key, Payload] = {}
        self.endings: dict[Key, type[Exception]] = {}
        self.abandoned: set[str] = set()
        self.claims: dict[int, tuple[Key, Payload]] = {}
        self.delivered: list[tuple[Key, str, object]] = []
        self.expected: list[tuple[Key, str, object]] = []
        self.waiting: dict[Key, dict[str, None]] = {}
        self.items = 0

    # ---- the model

    def take(self, key: Key, payload: Payload) -> None:
        payload.reads -= 1
        payload.out += 1
        if not payload.reads:
            del self.live[key]

    def finish(self, *keys: Key) -> None:
        for key, payload in self.claims.values():
            if key in keys:
                payload.dropped = True

    def end(self, key: Key, error: type[Exception]) -> int:
        self.finish(key)
        payload = self.live.pop(key, None)
        if payload is not None:
            payload.reads, payload.dropped = 0, True
        self.endings[key] = error
        for reader in self.waiting.pop(key, {}):
            self.expected.append((key, reader, error))
        return payload is not None

    def answer(self, key: Key) -> Payload | type[Exception] | None:
        if key in self.live:
            return self.live[key]
        if key.request_id in self.abandoned:
            return RequestAbandonedError
        return self.endings.get(key)

    # ---- the rules

    @rule(key=KEYS, readers=st.integers(1, 3), overwrite=st.booleans())
    def put(self, key: Key, readers: int, overwrite: bool) -> None:
        item = self.items = self.items + 1

        def publish() -> int:
            return self.ledger.publish(key, item, nbytes=10, readers=readers, ttl_s=1e6, overwrite=overwrite)

        if key.request_id in self.abandoned:
            with pytest.raises(RequestAbandonedError):
                publish()
            return
        if key in self.live and not overwrite:
            with pytest.raises(PayloadConflictError):
                publish()
            return
        if overwrite:
            self.finish(key)
        old = self.live.pop(key, None)
        if old is not None:
            old.reads, old.dropped = 0, True
        self.endings.pop(key, None)
        payload = self.payloads[item] = self.live[key] = Payload(item, readers)
        waiting = self.waiting.get(key, {})
        for reader in list(waiting)[:readers]:
            del waiting[reader]
            self.take(key, payload)
            self.expected.append((key, reader, payload))
        if not waiting:
            self.waiting.pop(key, None)
        publish()

    @rule(key=KEYS, reader=READERS)
    def claim(self, key: Key, reader: str) -> None:
        expected = self.answer(key)
        found = self.ledger.claim(key, reader)
        if isinstance(expected, Payload):
            assert isinstance(found, Claim)
            assert found.item == expected.item
            self.take(key, expected)
            self.claims[found.number] = (key, expected)
        elif expected is None:
            assert found is None
        else:
            assert type(found) is expected

    @rule(key=KEYS, reader=READERS)
    def wait(self, key: Key, reader: str) -> None:
        expected = self.answer(key)
        if expected is None:
            self.waiting.setdefault(key, {}).setdefault(reader)
        else:
            if isinstance(expected, Payload):
                self.take(key, expected)
            self.expected.append((key, reader, expected))
        self.ledger.wait(key, reader, lambda answer: self.deliver(key, reader, answer))

    def deliver(self, key: Key, reader: str, answer: object) -> None:
        self.delivered.append((key, reader, answer))

    @rule(key=KEYS, reader=READERS)
    def cancel(self, key: Key, reader: str) -> None:
        self.ledger.cancel(key, reader)
        waiting = self.waiting.get(key, {})
        waiting.pop(reader, None)
        if not waiting:
            self.waiting.pop(key, None)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), unread=st.booleans())
    def release(self, data: st.DataObject, unread: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.claims)))
        key, payload = self.claims.pop(number)
        payload.out -= 1
        other = self.live.get(key)
        comes_back = unread and not payload.dropped and other in (None, payload)
        if comes_back:
            payload.reads += 1
            self.live[key] = payload
            waiting = self.waiting.get(key)
            if waiting:
                reader = next(iter(waiting))
                del waiting[reader]
                if not waiting:
                    del self.waiting[key]
                self.take(key, payload)
                self.expected.append((key, reader, payload))
        self.ledger.release(number, unread=unread)
        self.ledger.release(number)  # ending it twice is harmless

    @rule(key=KEYS, really=SELDOM)
    def fail(self, key: Key, really: bool) -> None:
        if not really:
            return
        self.end(key, ProducerFailedError)
        self.ledger.fail(key, "reason")

    @rule(request_id=CLEANED)
    def cleanup(self, request_id: str) -> None:
        keys = [key for key in self.live if key.request_id == request_id]
        keys += [key for key in self.waiting if key.request_id == request_id and key not in keys]
        claimed = {key for key, _ in self.claims.values() if key.request_id == request_id}
        keys += [key for key in claimed if key not in keys]
        count = sum(self.end(key, RequestAbandonedError) for key in keys)
        self.abandoned.add(request_id)
        assert self.ledger.cleanup(request_id) == count

    @rule(key=KEYS, really=SELDOM)
    def expire(self, key: Key, really: bool) -> None:
        """Put a payload whose time is over at once."""
        if not really or key in self.live or key.request_id in self.abandoned or key in self.waiting:
            return
        self.items += 1
        self.ledger.publish(key, self.items, nbytes=10, readers=1, ttl_s=0, overwrite=False)
        self.payloads[self.items] = Payload(self.items, 0)
        self.ledger.sweep()
        self.finish(key)
        self.endings[key] = PayloadExpiredError

    # ---- what always holds

    @invariant()
    def every_delivery_is_the_expected_one(self) -> None:
        assert len(self.delivered) == len(self.expected)
        for (key, reader, answer), (its_key, its_reader, expected) in zip(
            sorted(self.delivered, key=str_of), sorted(self.expected, key=str_of), strict=True
        ):
            assert (key, reader) == (its_key, its_reader)
            if isinstance(expected, Payload):
                assert isinstance(answer, Claim)
                assert answer.item == expected.item
                self.claims[answer.number] = (key, expected)
            else:
                assert type(answer) is expected
        self.delivered.clear()
        self.expected.clear()

    @invariant()
    def exactly_what_nobody_can_read_is_freed_once(self) -> None:
        gone = sorted(item for item, payload in self.payloads.items() if not payload.reads and not payload.out)
        assert sorted(self.freed) == gone

    @invariant()
    def the_counts_are_right(self) -> None:
        assert self.ledger.pending().count == len(self.live)
        assert self.ledger.pending().nbytes == 10 * len(self.live)
        assert self.ledger.claims_out() == len(self.claims)
        for key in (Key("r"), Key("r", 1)):
            assert self.ledger.exists(key) == (key in self.live)
            assert self.ledger.claimed(key, Deadline(0)) == (key not in self.live)
            claimed = any(its_key == key for its_key, _ in self.claims.values())
            assert self.ledger.consumed(key, Deadline(0)) == (key not in self.live and not claimed)

    def teardown(self) -> None:
        self.ledger.close()
        for key, waiting in self.waiting.items():
            self.expected += [(key, reader, PeerLostError) for reader in waiting]
        self.every_delivery_is_the_expected_one()
        for number in list(self.claims):
            self.ledger.release(number)
        assert sorted(self.freed) == sorted(self.payloads)


def str_of(delivery: tuple[Key, str, object]) -> str:
    return str(delivery[:2])


LedgerModel.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestLedger = LedgerModel.TestCase

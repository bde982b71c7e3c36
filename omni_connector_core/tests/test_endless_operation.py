"""What a process keeps of requests that are over does not grow with their number."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

from omni_connector_core.claim import Claim
from omni_connector_core.key import Key
from omni_connector_core.ledger import Ledger

REQUESTS = 20_000
FEW_BYTES = 1 << 20
"""Far less than 100 bytes for each of `REQUESTS`."""


def growth(once: Callable[[int], object]) -> int:
    """Bytes by which Python's memory grows over `REQUESTS` calls."""
    tracemalloc.start()
    try:
        for number in range(100):
            once(-1 - number)
        before, _ = tracemalloc.get_traced_memory()
        for number in range(REQUESTS):
            once(number)
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def test_payloads_that_were_read_are_not_remembered_until_they_would_have_expired() -> None:
    ledger: Ledger[int] = Ledger(lambda item: None)

    def transfer(number: int) -> None:
        key = Key(f"request {number}")
        ledger.publish(key, number, nbytes=1, readers=1, ttl_s=1e6, overwrite=False)
        claim = ledger.claim(key, "reader")
        assert isinstance(claim, Claim)
        ledger.release(claim.number)

    assert growth(transfer) < FEW_BYTES


def test_payloads_that_stay_expire_all_the_same() -> None:
    ledger: Ledger[int] = Ledger(lambda item: None)
    ledger.publish(Key("stays"), 0, nbytes=1, readers=1, ttl_s=0.0, overwrite=False)
    for number in range(REQUESTS):
        ledger.publish(Key("read"), number, nbytes=1, readers=1, ttl_s=1e6, overwrite=True)
    ledger.sweep()
    assert ledger.expired == 1


def test_a_producer_without_payloads_forgets_abandoned_requests() -> None:
    ledger: Ledger[int] = Ledger(lambda item: None, endings_s=0.0)
    assert growth(lambda number: ledger.cleanup(f"request {number}")) < FEW_BYTES


def test_a_producer_without_payloads_forgets_failures() -> None:
    ledger: Ledger[int] = Ledger(lambda item: None, endings_s=0.0)
    assert growth(lambda number: ledger.fail(Key(f"request {number}"), "broken")) < FEW_BYTES


def test_an_ending_that_is_renewed_is_remembered_from_then_on() -> None:
    ledger: Ledger[int] = Ledger(lambda item: None)
    ledger.fail(Key("a"), "first")
    ledger.fail(Key("b"), "other")
    ledger.fail(Key("a"), "second")
    assert "second" in str(ledger.claim(Key("a"), "reader"))

"""Reads that are given back to a ledger."""

from __future__ import annotations

import pytest

from omni_connector_core import Key
from omni_connector_core.claim import Claim
from omni_connector_core.errors import ClosedError, OmniConnectorError, PayloadExpiredError
from omni_connector_core.ledger import Ledger

KEY = Key("k")


def test_a_read_that_is_given_back_expires_once() -> None:
    freed: list[str] = []
    ledger: Ledger[str] = Ledger(freed.append)
    told: list[Claim[str] | OmniConnectorError] = []
    assert ledger.claim(KEY, "reader", told.append) is None
    ledger.publish(KEY, "item", nbytes=1, readers=1, ttl_s=0.0, overwrite=False)
    [promised] = told
    assert isinstance(promised, Claim)
    ledger.release(promised.number, unread=True)
    ledger.sweep()
    assert (ledger.expired, freed) == (1, ["item"])
    assert isinstance(ledger.claim(KEY, "reader"), PayloadExpiredError)


def test_a_claim_that_has_to_wait_is_told_once() -> None:
    ledger: Ledger[str] = Ledger(lambda item: None)
    told: list[Claim[str] | OmniConnectorError] = []
    assert ledger.claim(KEY, "reader", told.append) is None
    for n in range(2):
        ledger.publish(Key("k", n), "item", nbytes=1, readers=1, ttl_s=9.0, overwrite=False)
    [claim] = told
    assert isinstance(claim, Claim)
    assert claim.key == KEY


def test_a_ledger_that_is_closed_takes_nothing_and_what_is_given_back_to_it_is_free() -> None:
    freed: list[str] = []
    ledger: Ledger[str] = Ledger(freed.append)
    ledger.publish(KEY, "item", nbytes=1, readers=1, ttl_s=9.0, overwrite=False)
    claim = ledger.claim(KEY, "reader")
    assert isinstance(claim, Claim)
    ledger.close()
    with pytest.raises(ClosedError):
        ledger.publish(Key("other"), "other", nbytes=1, readers=1, ttl_s=9.0, overwrite=False)
    assert freed == []
    ledger.release(claim.number, unread=True)
    assert freed == ["item"]

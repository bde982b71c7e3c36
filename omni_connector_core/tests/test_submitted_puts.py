"""Puts that were submitted, and a connector that is closed."""

from __future__ import annotations

import uuid

import pytest

from omni_connector_core import create_connector
from omni_connector_core.errors import ClosedError


def test_a_put_submitted_after_close_is_told_that_the_connector_is_closed() -> None:
    connector = create_connector("memory", namespace=uuid.uuid4().hex)
    connector.submit_put("first", 1).result()
    connector.close()
    with pytest.raises(ClosedError) as caught:
        connector.submit_put("second", 2).result()
    assert caught.value.backend == "memory"


def test_puts_that_close_overtakes_end_with_an_error_of_ours() -> None:
    config = {"capacity_bytes": 1000}
    with create_connector("memory", config, namespace=uuid.uuid4().hex) as connector:
        connector.put("full", b"x" * 500)
        handles = [connector.submit_put(f"waits {number}", b"x" * 500, timeout=0.5) for number in range(40)]
        connector.close()
        for handle in handles[32:]:  # more than the connector has threads
            with pytest.raises(ClosedError) as caught:
                handle.result()
            assert caught.value.backend == "memory"
            assert "waits" in str(caught.value.key)

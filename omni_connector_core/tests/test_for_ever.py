"""Timeouts and times-to-live without an end are taken, and no clock of the host is asked for more than it can do."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from omni_connector_core import Role, create_connector
from omni_connector_core.deadline import LONGEST_S, Deadline


@pytest.mark.parametrize(("timeout_s", "counts_as_s"), [(float("inf"), LONGEST_S), (1e300, LONGEST_S), (-1, 0)])
def test_a_deadline_is_never_too_far_away_to_wait_for(timeout_s: float, counts_as_s: float) -> None:
    deadline = Deadline(timeout_s)
    assert deadline.timeout_s == counts_as_s
    assert deadline.remaining_s() <= counts_as_s


def test_getting_and_keeping_for_ever() -> None:
    opening = {"namespace": uuid.uuid4().hex}
    for_ever = float("inf")
    with (
        create_connector("memory", role=Role.PRODUCER, **opening) as producer,
        create_connector("memory", role=Role.CONSUMER, **opening) as consumer,
        ThreadPoolExecutor(1) as threads,
    ):
        producer.put("kept", 1, ttl=for_ever)
        waiting = threads.submit(consumer.get, "k", timeout=for_ever)
        while not waiting.running():
            pass
        producer.put("k", 2, timeout=for_ever)
        assert waiting.result(30) == 2
        assert consumer.get("kept", timeout=for_ever) == 1

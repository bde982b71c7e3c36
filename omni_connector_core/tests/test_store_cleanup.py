"""The producing end over a store whose service stops answering in the middle of something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from file_store import file_store_class

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import BackendUnavailableError, RequestAbandonedError
from omni_connector_core.frame import Frame
from omni_connector_core.key import Edge, Key, Producer
from omni_connector_core.metadata import ANYWHERE
from omni_connector_core.store.consumer import ConsumerEnd
from omni_connector_core.store.directory import Directory
from omni_connector_core.store.names import Names
from omni_connector_core.store.producer import ProducerEnd


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """The file store that the template for new backends brings."""
    return file_store_class()(tmp_path / "store", 1 << 20)


@pytest.fixture
def ends(store: Any) -> Iterator[tuple[ProducerEnd, ConsumerEnd]]:
    names = Names("ns", Edge("0", "1"), longest=store.longest_name)
    producer = ProducerEnd(store, Directory(store, names), Producer(), deadline=Deadline(5))
    yield producer, ConsumerEnd(store, Directory(store, names), outlives=False)
    producer.close(Deadline(5))


@pytest.mark.parametrize("call", ["replace", "take", "remove"])
def test_a_cleanup_that_was_cut_short_is_finished_by_the_next(
    store: Any, ends: tuple[ProducerEnd, ConsumerEnd], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    producer, consumer = ends
    name = producer.owner.abandoned("r")
    real = getattr(store, call)

    def out_of_order(*args: Any, **options: Any) -> Any:
        if call == "replace" and args[0] != name:  # the heartbeat
            return real(*args, **options)
        raise BackendUnavailableError("the service does not answer")

    producer.put(Key("r"), Frame(b"x" * 100, []), readers=1, ttl_s=60, overwrite=False, deadline=Deadline(5))
    with monkeypatch.context() as patched:
        patched.setattr(store, call, out_of_order)
        with pytest.raises(BackendUnavailableError):
            producer.cleanup("r", deadline=Deadline(5))
    producer.cleanup("r", deadline=Deadline(5))
    assert producer.book.live == {}
    with pytest.raises(RequestAbandonedError):
        consumer.attempt(Key("r"), ANYWHERE, Deadline(5))


class Recorded:
    """Notes with which time-to-live a store is written to."""

    def __init__(self, store: Any) -> None:
        self._store, self.written = store, list[tuple[str, float]]()

    def replace(self, name: str, data: bytes, *, ttl_s: float, deadline: Deadline) -> None:
        self.written.append((name, ttl_s))
        self._store.replace(name, data, ttl_s=ttl_s, deadline=deadline)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_consumer_that_crashes_leaves_nothing_for_good(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(store)
    directory = Directory(recorded, Names("ns", Edge("0", "1"), longest=store.longest_name))
    directory.refresh(Deadline(5))
    directory.refresh(Deadline(5))
    [(witness, ttl_s)] = recorded.written
    assert 0 < ttl_s < float("inf")
    monkeypatch.setattr(directory, "_witness_at_s", directory._witness_at_s - 0.6 * ttl_s)
    directory.refresh(Deadline(5))
    assert recorded.written == 2 * [(witness, ttl_s)]  # renewed


def test_a_witness_that_expired_is_not_taken_for_a_restart(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory(store, Names("ns", Edge("0", "1"), longest=store.longest_name))
    for age_s, restarted in ((7200.0, False), (10.0, True)):
        directory.refresh(Deadline(5))
        assert directory._witness is not None
        store.remove([directory._witness], deadline=Deadline(5))
        monkeypatch.setattr(directory, "_witness_at_s", directory._witness_at_s - age_s)
        directory.refresh(Deadline(5))
        assert (directory._restarted_s > 0) is restarted

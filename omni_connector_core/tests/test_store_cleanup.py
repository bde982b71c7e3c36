"""The producing end over a store whose service stops answering in the middle of something."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from file_store import file_store_class

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import BackendUnavailableError, RequestAbandonedError, TransferTimeoutError
from omni_connector_core.frame import Frame
from omni_connector_core.key import Edge, Key, Producer
from omni_connector_core.liveness import Process, this_process
from omni_connector_core.metadata import ANYWHERE
from omni_connector_core.store.consumer import ConsumerEnd
from omni_connector_core.store.directory import Directory
from omni_connector_core.store.names import Names
from omni_connector_core.store.producer import ProducerEnd
from omni_connector_core.store.records import Owned, pack
from omni_connector_core.store.witness import PLACES


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
            producer.cleanup("r", deadline=Deadline(0.2))
    producer.cleanup("r", deadline=Deadline(5))
    assert producer.book.live == {}
    with pytest.raises(RequestAbandonedError):
        consumer.attempt(Key("r"), ANYWHERE, Deadline(5))


@pytest.mark.parametrize("call", ["replace", "take", "remove", "claim", "load", "exist"])
def test_a_cleanup_from_either_end_outlasts_a_service_that_does_not_answer_for_a_moment(
    store: Any, ends: tuple[ProducerEnd, ConsumerEnd], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    producer, consumer = ends
    real, left = getattr(store, call), 2

    def busy(*args: Any, **options: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise BackendUnavailableError("the service does not answer")
        return real(*args, **options)

    for number, end in enumerate([producer, consumer]):
        key = Key(f"r{number}")
        producer.put(key, Frame(b"x" * 100, []), readers=1, ttl_s=60, overwrite=False, deadline=Deadline(5))
        with monkeypatch.context() as patched:
            patched.setattr(store, call, busy)
            left = 2
            if end is producer:
                assert producer.cleanup(key.request_id, deadline=Deadline(5)) == 1
            else:
                assert consumer.cleanup(key.request_id, Deadline(5), but=None) == 1


class Recorded:
    """Notes with which time-to-live a store is written to."""

    def __init__(self, store: Any) -> None:
        self._store, self.written = store, list[tuple[str, float]]()

    def replace(self, name: str, data: bytes, *, ttl_s: float, deadline: Deadline) -> None:
        self.written.append((name, ttl_s))
        self._store.replace(name, data, ttl_s=ttl_s, deadline=deadline)

    def claim(self, name: str, data: bytes, *, ttl_s: float, deadline: Deadline) -> bool:
        self.written.append((name, ttl_s))
        return bool(self._store.claim(name, data, ttl_s=ttl_s, deadline=deadline))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def names(store: Any) -> Names:
    return Names("ns", Edge("0", "1"), longest=store.longest_name)


def witnesses(store: Any, names: Names) -> list[str]:
    places = [names.witness(str(number)) for number in range(PLACES)]
    return [place for place, there in zip(places, store.exist(places, deadline=Deadline(5)), strict=True) if there]


def age(directory: Directory, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(directory._witness, "_at_s", directory._witness._at_s - seconds)


def test_a_witness_expires_unless_it_is_renewed(store: Any, names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(store)
    directory = Directory(recorded, names)  # type: ignore[arg-type]
    directory.refresh(Deadline(5))
    directory.refresh(Deadline(5))
    [(witness, ttl_s)] = recorded.written
    assert 0 < ttl_s < float("inf")
    age(directory, monkeypatch, 0.6 * ttl_s)
    directory.refresh(Deadline(5))
    assert recorded.written == 2 * [(witness, ttl_s)]
    assert witnesses(store, names) == [witness]
    directory.close(Deadline(5))
    assert witnesses(store, names) == []


def test_a_witness_that_expired_is_not_taken_for_a_restart(
    store: Any, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Directory(store, names)
    for age_s, restarted in ((7200.0, False), (10.0, True)):
        directory.refresh(Deadline(5))
        store.remove(witnesses(store, names), deadline=Deadline(5))
        age(directory, monkeypatch, age_s)
        directory.refresh(Deadline(5))
        assert (directory._restarted_s > 0) is restarted


def test_anothers_witness_in_the_place_of_ones_own_tells_of_a_restart(store: Any, names: Names) -> None:
    directory = Directory(store, names)
    directory.refresh(Deadline(5))
    [place] = witnesses(store, names)
    store.replace(place, pack(place, Owned(this_process(), "another")), ttl_s=60, deadline=Deadline(5))
    directory.refresh(Deadline(5))
    assert directory._restarted_s > 0
    directory.close(Deadline(5))
    assert witnesses(store, names) == [place]


@pytest.mark.parametrize("who", ["the next consumer", "a producer that closes"])
def test_a_consumer_that_crashed_leaves_no_witness(store: Any, names: Names, who: str) -> None:
    """Also in a store in which nothing expires."""
    me = this_process()
    for number, started in enumerate((me.started, me.started - 1)):
        name = names.witness(str(number))
        owned = pack(name, Owned(Process(me.host, me.pid, started), "nonce"))
        store.replace(name, owned, ttl_s=0, deadline=Deadline(5))
    if who == "the next consumer":
        directory = Directory(store, names)
        directory.refresh(Deadline(5))
        directory.close(Deadline(5))
    else:
        ProducerEnd(store, Directory(store, names), Producer(), deadline=Deadline(5)).close(Deadline(5))
    assert witnesses(store, names) == [names.witness("0")]


def test_a_get_behind_anothers_unanswered_question_times_out_as_any_other(
    store: Any, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, answered = threading.Event(), threading.Event()
    real = store.exist

    def exist(*args: Any, **options: Any) -> Any:
        asking.set()
        answered.wait(30)
        return real(*args, **options)

    monkeypatch.setattr(store, "exist", exist)
    consumer = ConsumerEnd(store, Directory(store, names), outlives=False)
    other = threading.Thread(target=consumer.directory.refresh, args=(Deadline(30),))
    other.start()
    try:
        assert asking.wait(30)
        with pytest.raises(TransferTimeoutError):
            consumer.get(Key("k"), ANYWHERE, Deadline(0.05), closed=lambda: False)
    finally:
        answered.set()
        other.join()

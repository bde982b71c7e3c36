"""Reads that are decided by tickets: each payload is read once, whoever can see the tickets and whoever cannot."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from file_store import file_store_class

from omni_connector_contract_tests.harness.eventually import eventually
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import BackendUnavailableError, OmniConnectorError
from omni_connector_core.frame import Frame
from omni_connector_core.key import Edge, Key, Producer
from omni_connector_core.liveness import Process, this_process
from omni_connector_core.metadata import ANYWHERE, Where
from omni_connector_core.store import own_host, tickets
from omni_connector_core.store.consumer import ConsumerEnd
from omni_connector_core.store.directory import Directory
from omni_connector_core.store.names import Names
from omni_connector_core.store.producer import ProducerEnd
from omni_connector_core.store.records import Slot

CONTENT = b"x" * 100


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """The file store that the template for new backends brings, with tickets."""

    class Store(file_store_class()):
        tickets = True

        def __init__(self) -> None:
            super().__init__(tmp_path / "store", 1 << 20)
            self.takes: list[list[str]] = []

        def take(self, names: Any, *, deadline: Deadline) -> Any:
            self.takes.append(list(names))
            return super().take(names, deadline=deadline)

    return Store()


class Ends:
    """A producer, and consumers of this host and of "another one"."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.names = Names("ns", Edge("0", "1"), longest=store.longest_name)
        self.producer = ProducerEnd(store, Directory(store, self.names), Producer(), deadline=Deadline(5))

    def consumer(self) -> ConsumerEnd:
        return ConsumerEnd(self.store, Directory(self.store, self.names), outlives=False)

    def put(self, request: str, **options: Any) -> dict[str, Any]:
        how: dict[str, Any] = {"readers": 1, "ttl_s": 60.0, "overwrite": False, "deadline": Deadline(5), **options}
        return self.producer.put(Key(request), Frame(CONTENT, []), **how)

    def where(self, at: dict[str, Any]) -> Where:
        return Where(producer=Producer(), at=at, nbytes=self.producer.book.entries()[-1].nbytes)


@pytest.fixture
def ends(store: Any) -> Iterator[Ends]:
    ends = Ends(store)
    yield ends
    ends.producer.close(Deadline(5))


@pytest.fixture
def out_of_sight(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make this process see no tickets from now on, as one of another host."""

    def hide() -> None:
        monkeypatch.setattr("omni_connector_core.store.consumer.tickets.folder_of", lambda slot: None)

    return hide


def folder(ends: Ends) -> Path:
    found = tickets.folder_of(ends.producer.slot)
    assert found is not None
    return Path(found)


def get(consumer: ConsumerEnd, request: str, where: Where = ANYWHERE, timeout: float = 10.0) -> Any:
    return consumer.get(Key(request), where, Deadline(timeout), closed=lambda: False)


@pytest.mark.parametrize("straight", [False, True])
def test_a_read_on_the_producers_host_asks_the_store_for_no_decision(ends: Ends, straight: bool) -> None:
    at = ends.put("r")
    where = ends.where(at) if straight else ANYWHERE
    assert os.listdir(folder(ends)) == [str(at["generation"])]
    memory = get(ends.consumer(), "r", where)
    assert CONTENT in bytes(memory)
    assert os.listdir(folder(ends)) == []
    assert ends.store.takes == []
    assert ends.producer.unread([Key("r")], deadline=Deadline(5)) == [False]


@pytest.mark.parametrize("handed_over", [False, True])
def test_of_many_consumers_one_reads(ends: Ends, handed_over: bool) -> None:
    consumers = [ends.consumer() for _ in range(8)]
    for round_ in range(20):
        request, got = f"r{round_}", []
        ends.put(request)
        if handed_over and round_ == 10:
            ends.producer._hand_over(Deadline(5))
        start = threading.Barrier(len(consumers))

        def compete(consumer: ConsumerEnd, request: str = request, got: list[Any] = got, start: Any = start) -> None:
            start.wait()
            memory = consumer.attempt(Key(request), ANYWHERE, Deadline(5))
            if memory is not None:
                got.append(memory)

        threads = [threading.Thread(target=compete, args=(consumer,)) for consumer in consumers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1


@pytest.mark.parametrize("straight", [False, True])
def test_a_consumer_that_sees_no_tickets_has_them_handed_over(
    ends: Ends, out_of_sight: Callable[[], None], straight: bool
) -> None:
    at, mine = ends.put("r"), folder(ends)
    where = ends.where(at) if straight else ANYWHERE
    out_of_sight()
    consumer = ends.consumer()
    assert consumer.attempt(Key("r"), where, Deadline(5)) is None  # a poll does not wait
    assert CONTENT in bytes(get(consumer, "r", where))
    assert not mine.exists()
    assert ends.put("later")["ticket"] is False
    assert CONTENT in bytes(get(consumer, "later"))
    assert not ends.store.exist([ends.producer.owner.wanted], deadline=Deadline(5))[0]


def test_what_was_read_by_ticket_is_not_read_again_after_the_hand_over(ends: Ends, store: Any) -> None:
    store.discard = lambda name, deadline: None  # the consumer died before it removed what it had read
    at = ends.put("read")
    where = ends.where(at)
    ends.put("unread")
    assert get(ends.consumer(), "read", where) is not None
    ends.producer._hand_over(Deadline(5))
    assert ends.consumer().attempt(Key("read"), where, Deadline(5)) is None
    assert ends.consumer().attempt(Key("unread"), ANYWHERE, Deadline(5)) is not None


def test_a_hand_over_that_was_cut_short_is_finished_by_the_next(
    ends: Ends, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.discard = lambda name, deadline: None
    at = ends.put("read")
    where = ends.where(at)
    assert get(ends.consumer(), "read", where) is not None
    with monkeypatch.context() as patched:

        def no_answer(*_: Any, **__: Any) -> Any:
            raise BackendUnavailableError("the service does not answer")

        patched.setattr(store, "take", no_answer)
        with pytest.raises(BackendUnavailableError):
            ends.producer._hand_over(Deadline(5))
    assert not store.exist([ends.producer.owner.handed_over], deadline=Deadline(5))[0]
    ends.producer._hand_over(Deadline(5))
    assert ends.consumer().attempt(Key("read"), where, Deadline(5)) is None


def test_what_a_dead_consumer_had_read_is_removed_by_the_producer(ends: Ends, store: Any) -> None:
    store.discard = lambda name, deadline: None
    at = ends.put("r")
    assert get(ends.consumer(), "r") is not None
    name = ends.producer.owner.data(at["generation"])
    eventually(lambda: not store.exist([name], deadline=Deadline(5))[0])


@pytest.mark.parametrize("how", ["fail", "cleanup", "overwrite", "expiry"])
def test_endings_take_the_ticket(ends: Ends, store: Any, how: str) -> None:
    at = ends.put("r", ttl_s=0.05 if how == "expiry" else 60.0)
    producer, name = ends.producer, ends.producer.owner.data(at["generation"])
    ticket = folder(ends) / str(at["generation"])
    if how == "fail":
        producer.fail(Key("r"), "no more", deadline=Deadline(5))
    elif how == "cleanup":
        assert producer.cleanup("r", deadline=Deadline(5)) == 1
    elif how == "overwrite":
        assert ends.put("r", overwrite=True)["generation"] != at["generation"]
    else:
        eventually(lambda: producer.book.expired == 1)
    assert not ticket.exists()
    assert not store.exist([name], deadline=Deadline(5))[0]
    assert producer.book.expired == (how == "expiry")


def test_a_put_that_failed_leaves_no_ticket(ends: Ends, store: Any) -> None:
    def no(*_: Any, **__: Any) -> Any:
        raise OmniConnectorError("no")

    store.create = no
    with pytest.raises(OmniConnectorError):
        ends.put("r")
    assert os.listdir(folder(ends)) == []


def test_payloads_with_several_readers_have_none(ends: Ends) -> None:
    assert ends.put("r", readers=2)["ticket"] is False
    assert all(get(ends.consumer(), "r") is not None for _ in range(2))
    assert ends.consumer().attempt(Key("r"), ANYWHERE, Deadline(5)) is None


def test_exists_follows_the_ticket(ends: Ends, store: Any) -> None:
    store.discard = lambda name, deadline: None
    consumer = ends.consumer()
    ends.put("r")
    assert consumer.exists([Key("r"), Key("other")], ANYWHERE, Deadline(5)) == [True, False]
    assert get(consumer, "r") is not None
    assert consumer.exists([Key("r")], ANYWHERE, Deadline(5)) == [False]


def test_what_was_read_is_not_pending_also_when_the_store_does_not_answer(
    ends: Ends, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends.put("read")
    ends.put("unread")

    def no_answer(*_: Any, **__: Any) -> Any:
        raise BackendUnavailableError("the service does not answer")

    assert get(ends.consumer(), "read") is not None
    monkeypatch.setattr(store, "exist", no_answer)
    assert [entry.key for entry in ends.producer.pending()] == [Key("unread")]
    monkeypatch.undo()


def test_closing_leaves_nothing_and_the_dead_are_cleared_up_after(store: Any) -> None:
    ends = Ends(store)
    ends.put("r")
    mine = folder(ends)
    assert mine.is_dir()
    ends.producer.close(Deadline(5))
    assert not mine.exists()
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    host = this_process().host
    dead = Slot(0, 0, "0123456789abcdef", Process(host, int(child.stdout), 1))
    living = Slot(0, 0, "0123456789abcdef", this_process())
    for slot in (dead, living):
        os.mkdir(tickets.folder_of(slot) or "")
    tickets.Tickets(Slot(0, 0, "fedcba9876543210", this_process()), wanted=True).close()
    assert not Path(tickets.folder_of(dead) or "").exists()
    assert Path(tickets.folder_of(living) or "").exists()
    os.rmdir(tickets.folder_of(living) or "")


def test_where_no_folder_can_be_made_the_store_decides(
    store: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(own_host, "folder_for", lambda kind, host: tmp_path / "file" / kind)
    tickets.folder_of.cache_clear()
    ends = Ends(store)
    assert ends.put("r")["ticket"] is False
    assert get(ends.consumer(), "r") is not None
    ends.producer.close(Deadline(5))

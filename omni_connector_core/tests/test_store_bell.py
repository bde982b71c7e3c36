"""A consumer that waits hears of a put on its own host, and looks by itself where it cannot."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from file_store import file_store_class

from omni_connector_contract_tests.harness.eventually import eventually
from omni_connector_core import Edge, Key, Producer, ProducerFailedError, RequestAbandonedError
from omni_connector_core.deadline import Deadline
from omni_connector_core.frame import Frame
from omni_connector_core.liveness import this_process
from omni_connector_core.metadata import ANYWHERE
from omni_connector_core.store import bell, consumer, own_host
from omni_connector_core.store.bell import Bells, Listener
from omni_connector_core.store.consumer import ConsumerEnd
from omni_connector_core.store.directory import Directory
from omni_connector_core.store.names import Names
from omni_connector_core.store.producer import ProducerEnd

NAMES = Names("ns", Edge("0", "1"), longest=200)
spawn = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for bells of this test alone."""
    monkeypatch.setattr(own_host, "folder_for", lambda kind, host: tmp_path / "own" / kind)
    return tmp_path / "own" / bell.KIND


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return file_store_class()(tmp_path / "store", 1 << 20)


@pytest.fixture
def producer(store: Any) -> Iterator[ProducerEnd]:
    end = ProducerEnd(store, Directory(store, NAMES), Producer(), deadline=Deadline(5))
    yield end
    end.close(Deadline(5))


@pytest.fixture
def end(store: Any) -> Iterator[ConsumerEnd]:
    end = ConsumerEnd(store, Directory(store, NAMES), outlives=False)
    yield end
    end.close(Deadline(5))


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hears nothing sleeps for longer than any test waits, once it has slept a little."""
    monkeypatch.setattr(consumer, "LONGEST_PAUSE_S", 60.0)
    wait = Listener.wait
    monkeypatch.setattr(Listener, "wait", lambda self, *a: wait(self, *a[:2], a[2] if a[1] is None else 60.0))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def put(producer: ProducerEnd, request: str) -> None:
    producer.put(Key(request), Frame(b"x", []), readers=1, ttl_s=60, overwrite=False, deadline=Deadline(5))


def asleep(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many sleep on the bell."""
    sleeping: list[str] = []
    wait = bell._Bell.wait

    def counted(self: Any, request: str, *how: Any) -> bool:
        sleeping.append(request)
        return wait(self, request, *how)

    monkeypatch.setattr(bell._Bell, "wait", counted)
    return lambda: len(set(sleeping))


def waiting(end: ConsumerEnd, pool: ThreadPoolExecutor, request: str) -> Future[Any]:
    return pool.submit(end.get, Key(request), ANYWHERE, Deadline(20), closed=lambda: False)


@pytest.mark.usefixtures("deaf")
def test_a_put_wakes_who_waits_for_it(
    producer: ProducerEnd, end: ConsumerEnd, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeping = asleep(monkeypatch)
    gets = [waiting(end, pool, f"r{n}") for n in range(6)]
    eventually(lambda: sleeping() == 6)
    for n in range(6):
        put(producer, f"r{n}")
    assert all(b"x" in bytes(get.result(10)) for get in gets)


@pytest.mark.usefixtures("deaf")
@pytest.mark.parametrize("ending", [ProducerFailedError, RequestAbandonedError])
def test_an_ending_wakes_who_waits_for_it(
    ending: type[Exception],
    producer: ProducerEnd,
    end: ConsumerEnd,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleeping = asleep(monkeypatch)
    get = waiting(end, pool, "r")
    eventually(lambda: sleeping() == 1)
    if ending is ProducerFailedError:
        producer.fail(Key("r"), "no", deadline=Deadline(5))
    else:
        producer.cleanup("r", deadline=Deadline(5))
    with pytest.raises(ending):
        get.result(10)


def test_who_polls_hears_whether_a_poll_can_find_anything(
    producer: ProducerEnd, end: ConsumerEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "LONGEST_PAUSE_S", 3600.0)
    assert end.attempt(Key("r"), ANYWHERE, Deadline(5)) is None
    news = end.news()
    assert news is not None
    assert end.news() == news
    for _ in range(3):
        put(producer, "r")
        assert end.news() != news
        news = end.news()
        assert end.attempt(Key("r"), ANYWHERE, Deadline(5)) is not None
    producer.fail(Key("r"), "no", deadline=Deadline(5))
    assert end.news() != news


def test_now_and_then_there_is_news_all_the_same(end: ConsumerEnd) -> None:
    news = end.news()
    eventually(lambda: end.news() != news)


def test_of_producers_that_cannot_ring_there_is_no_news(producer: ProducerEnd, end: ConsumerEnd) -> None:
    end.directory.refresh(Deadline(5))
    ((number, slot),) = end.directory.known.items()
    assert end.news() is not None
    elsewhere = msgspec.structs.replace(slot.process, host="elsewhere/1")
    end.directory.known[number] = msgspec.structs.replace(slot, process=elsewhere)
    assert end.news() is None


def ring(folder: Path, scope: str, go: Any) -> None:
    own_host.folder_for = lambda kind, host: folder  # type: ignore[assignment]
    bells = Bells(scope)
    go.wait()
    bells.ring("r")


def test_another_process_is_heard(folder: Path) -> None:
    listener, go = Listener(NAMES.scope), spawn.Event()
    assert listener.wait("r", listener.heard("r"), 0) is False  # hung up
    child = spawn.Process(target=ring, args=(folder, NAMES.scope, go))
    child.start()
    heard = listener.heard("r")
    assert heard is not None
    go.set()
    assert listener.wait("r", heard, 30.0)
    assert listener.wait("r", heard, 0.0), "what rang before the wait is not missed"
    child.join()
    listener.close()


def hung_up(scope: str = NAMES.scope) -> Listener:
    listener = Listener(scope)
    listener.wait("r", None, 0)
    return listener


def test_bells_that_come_and_go_in_quick_succession_are_all_rung(folder: Path) -> None:
    bells, listeners = Bells(NAMES.scope), []
    bells.ring("r")  # nobody is there
    for n in range(20):
        listeners.append(hung_up())
        before = [listener.heard("r") for listener in listeners]
        bells.ring("r")
        assert all(listener.heard("r") != was for listener, was in zip(listeners, before, strict=True))
        if n % 3 == 2:
            listeners.pop(0).close()
    assert len(os.listdir(folder)) == len(listeners)
    for listener in listeners:
        listener.close()
    bells.ring("r")
    assert os.listdir(folder) == []


def test_a_bell_keeps_no_descriptor_and_no_memory(folder: Path) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(folder))

    hung_up()
    files = len(os.listdir("/proc/self/fd"))
    listener, bells = hung_up(), Bells(NAMES.scope)
    bells.ring("r")
    assert len(os.listdir("/proc/self/fd")) == files
    assert mapped() == 2
    listener.close()
    bells.ring("r")
    del listener
    assert mapped() == 0


def test_another_edge_and_another_request_are_not_heard() -> None:
    listener = hung_up()
    heard, other = listener.heard("r"), listener.heard("other")
    Bells(Names("ns", Edge("1", "2"), longest=200).scope).ring("r")
    assert listener.heard("r") == heard
    Bells(NAMES.scope).ring("r")
    assert listener.heard("r") != heard
    assert listener.heard("other") == other
    listener.close()


def hang_up_and_stay(folder: Path, ready: Any) -> None:
    own_host.folder_for = lambda kind, host: folder  # type: ignore[assignment]
    kept = hung_up()
    ready.set()
    threading.Event().wait()
    kept.close()


def test_what_a_killed_consumer_hung_up_is_rung_in_vain_and_taken_down_by_the_next(folder: Path) -> None:
    ready = spawn.Event()
    child = spawn.Process(target=hang_up_and_stay, args=(folder, ready))
    child.start()
    assert ready.wait(30)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    (left,) = folder.iterdir()
    left.with_name("." + left.name).write_text("killed while it made this")
    Bells(NAMES.scope).ring("r")
    listener = hung_up()
    assert [name.split("-")[0] for name in os.listdir(folder)] == [str(os.getpid())]
    listener.close()


def test_what_is_no_bell_is_left_alone(folder: Path) -> None:
    listener, bells = hung_up(), Bells(NAMES.scope)
    (bell,) = folder.iterdir()
    strange = {bell.with_name(bell.name + end) for end in ("empty", "folder", "link")}
    for path in strange:
        if path.name.endswith("empty"):
            path.write_bytes(b"")
        elif path.name.endswith("folder"):
            path.mkdir()
        else:
            path.symlink_to("/etc/hostname")
    heard = listener.heard("r")
    bells.ring("r")
    assert listener.heard("r") != heard
    assert strange <= set(folder.iterdir())
    listener.close()


@pytest.mark.parametrize("how", ["removed", "opened to others"])
def test_a_folder_that_cannot_be_trusted_rings_nothing_and_fails_no_put(
    how: str, folder: Path, producer: ProducerEnd
) -> None:
    listener = hung_up()
    put(producer, "before")
    heard = listener.heard("r")
    if how == "removed":
        shutil.rmtree(folder)
    else:
        folder.chmod(0o777)
        (folder / "changed").write_text("")
    put(producer, "r")
    assert listener.heard("r") == heard
    listener.close()


def test_a_listener_that_is_dropped_takes_its_bell_down(folder: Path) -> None:
    hung_up()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("reason", ["no folder", "not private"])
def test_where_no_bell_can_be_hung_up_a_consumer_looks_by_itself(
    reason: str, folder: Path, producer: ProducerEnd, end: ConsumerEnd, pool: ThreadPoolExecutor
) -> None:
    if reason == "no folder":
        folder.parent.parent.mkdir(exist_ok=True)
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.parent.write_text("")
    else:
        folder.parent.mkdir(exist_ok=True)
        folder.parent.chmod(0o777)
    get = waiting(end, pool, "r")
    put(producer, "r")
    assert b"x" in bytes(get.result(10))
    assert end._listener.heard("r") is None
    assert end.news() is None


def test_a_wait_ends_by_itself_and_costs_no_time_of_the_processor(end: ConsumerEnd) -> None:
    listener = hung_up()
    heard, began_s, used_s = listener.heard("r"), time.monotonic(), time.thread_time()
    assert listener.wait("r", heard, 0.3) is False
    assert time.monotonic() - began_s >= 0.3
    assert time.thread_time() - used_s < 0.1
    listener.close()


def test_who_waits_when_it_is_closed_is_not_harmed(pool: ThreadPoolExecutor) -> None:
    listener = hung_up()
    wait = pool.submit(listener.wait, "r", listener.heard("r"), 0.2)
    listener.close()
    assert wait.result(10) is False
    assert this_process().here()

"""The parts of the store protocol that need no store: names, records, liveness, the producer's book."""

import os
import subprocess
import sys
import threading

import pytest

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import RequestAbandonedError
from omni_connector_core.key import Edge, Key, Producer
from omni_connector_core.liveness import Process, forget, this_process
from omni_connector_core.store import directory
from omni_connector_core.store.book import Book, Entry
from omni_connector_core.store.directory import Directory
from omni_connector_core.store.names import Names
from omni_connector_core.store.records import Beat, Descriptor, Mail, Slot, pack, unpack

LONGEST = 248


def names_of(namespace="ns", edge=Edge("0", "1"), producer=Producer(), incarnation="0123456789abcdef", longest=LONGEST):
    return Names(namespace, edge, longest=longest).owner(producer, incarnation)


HARD = ["k", "k:0", "k=3A0", "é" * 500, "x" * 1024, "a/b", "#", "d:1", " "]


@pytest.mark.parametrize("longest", [200, LONGEST, 1024])
def test_names_of_different_things_differ_and_fit(longest):
    seen = []
    for namespace in ("ns", "ns:0", "n" * 400, "n" * 401):
        for edge in (Edge("0", "1"), Edge("0:1", ""), Edge("", "0:1"), Edge("1", "0")):
            names = Names(namespace, edge, longest=longest)
            seen += [names.slot(0), names.slot(1), names.notice(0), names.witness("0")]
            for producer in (Producer(0, 0), Producer(0, 1), Producer(1, 0)):
                owner = names.owner(producer, "0123456789abcdef")
                seen += [owner.beat, owner.mailbox, owner.answer("1"), owner.data(1), owner.data(11)]
                seen += owner.reads(1, 12)
                for text in HARD:
                    seen += [
                        owner.abandoned(text),
                        owner.descriptor(Key(text)),
                        owner.descriptor(Key("k", 1, text[:256])),
                    ]
    assert len(set(seen)) == len(seen)
    assert max(map(len, seen)) <= longest


def test_the_prefix_of_an_owner_is_its_own():
    """Purging a dead one's objects by prefix must not touch another's."""
    owners = [names_of(producer=Producer(*who)).prefix for who in ((0, 1), (0, 11), (1, 1), (11, 1))]
    for one in owners:
        assert [other for other in owners if other.startswith(one)] == [one]


@pytest.mark.parametrize(
    "record",
    [
        Descriptor(3, 4096, 2),
        Descriptor(ending="PayloadExpiredError", message="näh"),
        Slot(1, 2, "abc", this_process()),
        Beat(7),
        Mail("id", "request"),
    ],
)
def test_a_record_comes_back_or_not_at_all(record):
    data = pack("name", record)
    assert unpack("name", data, type(record)) == record
    for n in range(len(data)):
        assert unpack("name", data[:n], type(record)) is None
        assert unpack("name", data[:n] + bytes([data[n] ^ 1]) + data[n + 1 :], type(record)) is None
    assert unpack("name", None, type(record)) is None
    assert unpack("another", data, type(record)) is None


def test_a_record_of_another_kind_is_none():
    assert unpack("name", pack("name", Mail("id", "request")), Descriptor) is None


def test_this_process_lives_and_another_of_its_id_does_not():
    me = this_process()
    assert me.here()
    assert not me.dead()
    assert Process(me.host, me.pid, me.started - 1).dead()


def test_a_process_that_ended_is_dead_also_as_a_zombie():
    code = "import sys; from omni_connector_core.liveness import this_process\n"
    code += "p = this_process(); print(p.pid, p.started, flush=True); sys.stdin.read()"
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        process = Process(this_process().host, *map(int, child.stdout.readline().split()))
        assert not process.dead()
        child.stdin.close()
        while child.poll() is None and not process.dead():
            pass
        assert process.dead()


def test_a_process_of_another_host_is_never_said_to_be_dead():
    assert not Process("elsewhere", 1, 0).dead()


def test_silence_is_what_looks_found_and_not_the_time_in_which_nobody_looked(monkeypatch):
    """A get with metadata looks at no heartbeat until a read fails, which may be a minute after the last look."""
    now, beats = [0.0], [Beat(1)]

    class Store:
        def load(self, names, *, deadline):
            return [None if beat is None else pack(name, beat) for name, beat in zip(names, beats, strict=True)]

    monkeypatch.setattr(directory.time, "monotonic", lambda: now[0])
    known = Directory(Store(), Names("ns", Edge("0", "1"), longest=LONGEST))
    slot = Slot(0, 0, "0123456789abcdef", Process("another host", 1, 1))

    def gone_after(seconds):
        now[0] += seconds
        return known.gone(slot, Deadline(1))

    assert not gone_after(0)
    beats[0] = None
    assert not gone_after(60)
    assert [gone_after(2) for _ in range(5)] == [False, False, False, False, True]
    beats[0] = Beat(2)
    assert not gone_after(2)


def entry(key, nbytes=10):
    return Entry(key, 1, nbytes, 1, born_s=0.0, expires_s=0.0)


def test_the_book_counts_bytes_from_reserving_to_dropping():
    book, key = Book(), Key("r")
    assert book.reserve(10, 15)
    assert not book.reserve(10, 15)
    book.add(entry(key))
    assert book.held_bytes == 10
    assert book.reserve(5, 15)
    book.unreserve(5)
    assert book.reserve(4, None)
    book.add(entry(key, 4))  # replaces
    assert book.held_bytes == 4
    book.end(key)
    assert book.held_bytes == 0
    assert key in book.endings
    book.forget(key)
    assert key not in book.endings


def test_abandoning_finds_the_keys_of_exactly_that_request():
    book = Book()
    for key in (Key("r"), Key("r", 1), Key("r", 0, "s"), Key("r1"), Key("R")):
        book.reserve(10, None)
        book.add(entry(key))
    assert book.abandon("r") == [Key("r"), Key("r", 0, "s"), Key("r", 1)]
    with pytest.raises(RequestAbandonedError):
        book.check(Key("r", 99))
    book.check(Key("r1"))
    book.readmit("r")
    book.check(Key("r"))


def test_a_key_is_changed_by_one_at_a_time_and_the_idle_ones_can_be_had_at_once():
    book, a, b = Book(), Key("a"), Key("b")
    order = []

    def second():
        with book.changing(a):
            order.append("second")

    with book.changing(a):
        thread = threading.Thread(target=second)
        thread.start()
        with book.changing_idle([a, b]) as held:
            assert held == [b]
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    with book.changing_idle([a, b]) as held:
        assert held == [a, b]


def test_processes_that_were_asked_for_leave_no_descriptor():
    def watched():
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum("pidfd" in os.readlink(link) for link in links if os.path.islink(link))

    assert not this_process().dead()
    assert watched() >= 1
    forget()
    assert watched() == 0

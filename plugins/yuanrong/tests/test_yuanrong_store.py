"""`YuanrongStore` and the vendor's traps under it, each provoked on real workers."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from omni_connector_contract_tests.harness.eventually import eventually
from omni_connector_core import create_connector
from omni_connector_core.codec import Codec
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import BackendUnavailableError, ClosedError, OmniConnectorError, PayloadTooLargeError
from omni_connector_core.onesided import OneSidedOptions
from omni_connector_core.store import NewObject, NoRoomError
from omni_connector_core.transport import TransportContext
from omni_connector_yuanrong import ascend, sdk
from omni_connector_yuanrong.options import YuanrongOptions
from omni_connector_yuanrong.store import TAKEN

TTL_S = 30.0


def soon() -> Deadline:
    return Deadline(8)


def create(store, *names, content=b"content"):
    store.create([NewObject(name, content) for name in names], ttl_s=TTL_S, deadline=soon())


def read(store, name, nbytes=7, *, shared=False):
    return store.read(name, nbytes, shared=shared, deadline=soon())


def vendor(cluster, worker=0):
    return sdk.open_session(YuanrongOptions(**cluster.config(worker)), Deadline(8)).client


def used(store):
    """Bytes in use in the worker."""
    return eventually(store._open.usage).allocated


# ---- one object


def test_frames_and_bytes_come_back_as_they_were(cluster, name):
    store = cluster.store()
    payload = {"a": np.arange(100_000, dtype=np.float32), "b": b"x" * 99}
    frame = Codec().encode(payload)
    store.create([NewObject(name, frame), NewObject(name + "d", b"record")], ttl_s=TTL_S, deadline=soon())
    memory = read(store, name, frame.nbytes)
    found = Codec().decode(memory)
    assert np.array_equal(found["a"], payload["a"])
    assert found["b"] == payload["b"]
    assert store.load([name + "d", name + "none"], deadline=soon()) == [b"record", None]


def test_what_others_may_read_is_read_only_and_what_nobody_else_has_is_not(cluster, name):
    store = cluster.store()
    create(store, name)
    ours = memoryview(read(store, name)).cast("B")
    shared = memoryview(read(store, name, shared=True)).cast("B")
    assert not ours.readonly
    assert shared.readonly
    ours[0] = ord("C")  # it is one memory, which is why
    assert bytes(shared) == b"Content"


def test_a_view_outlives_removal_store_and_the_reuse_of_memory(cluster, name):
    """Trap: a view keeps its bytes only while the client lives that read them."""
    mine, other = cluster.store(0), cluster.store(0)
    content = b"\1" * 600_000
    create(mine, name, content=content)
    view = np.frombuffer(read(mine, name, len(content)), np.uint8)
    mine.remove([name], deadline=soon())
    mine.close()
    cluster.opened.remove(mine)
    del mine
    gc.collect()
    for number in range(50):
        create(other, f"{name}{number}", content=b"\2" * 600_000)
    assert (view == 1).all()
    other.remove([f"{name}{number}" for number in range(50)], deadline=soon())


def test_leases_are_counted_until_the_last_view_is_gone(cluster, name):
    store = cluster.store()
    create(store, name)
    memory = read(store, name)
    part = memoryview(memory)[2:4]
    del memory
    assert store.held_bytes == 7
    del part
    gc.collect()
    assert store.held_bytes == 0


def test_memory_is_free_again_after_it_was_read_and_taken(cluster, name):
    """Trap: what one client created and another published is never freed."""
    store = cluster.store()
    before = used(store)
    for number in range(4):
        create(store, f"{name}{number}", content=b"x" * 10_000_000)
        memory = read(store, f"{name}{number}", 10_000_000)
        assert store.take([f"{name}{number}"], deadline=soon()) == f"{name}{number}"
        del memory
    eventually(lambda: used(store) < before + 1_000_000)


def test_an_object_of_another_size_than_was_said_is_an_error(cluster, name):
    store = cluster.store()
    create(store, name)
    with pytest.raises(OmniConnectorError, match="7 bytes, not 8"):
        read(store, name, 8)


# ---- the two atomic operations


@pytest.mark.parametrize("operation", ["claim", "take"])
def test_exactly_one_wins_across_workers(cluster, name, operation):
    stores = [cluster.store(0), cluster.store(1)]
    names = [f"{name}{number}" for number in range(20)]
    if operation == "take":
        create(stores[0], *names)
    wins: list[str] = []
    gate = threading.Barrier(4)

    def race(number):
        gate.wait()
        for wanted in names:
            if operation == "take":
                won = stores[number % 2].take([wanted], deadline=soon()) is not None
            else:
                won = stores[number % 2].claim(wanted, f"of {number}".encode(), ttl_s=TTL_S, deadline=soon())
            if won:
                wins.append(wanted)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(wins) == sorted(names)


def test_a_claim_whose_answer_was_lost_is_still_ours(cluster, name):
    store = cluster.store()
    assert store.claim(name, b"mine", ttl_s=TTL_S, deadline=soon())
    assert store.claim(name, b"mine", ttl_s=TTL_S, deadline=soon())  # asked again: it is
    assert not store.claim(name, b"theirs", ttl_s=TTL_S, deadline=soon())


def test_what_was_taken_is_gone_at_once_for_everybody(cluster, name):
    here, there = cluster.store(0), cluster.store(1)
    create(here, name, name + "2")
    assert there.exist([name, name + "2", name + "3"], deadline=soon()) == [True, True, False]
    assert here.take([name, name + "2"], deadline=soon()) == name
    assert there.exist([name, name + "2"], deadline=soon()) == [False, True]
    assert there.take([name], deadline=soon()) is None
    assert there.take([name, name + "2"], deadline=soon()) == name + "2"
    assert here.take([name, name + "2"], deadline=soon()) is None


def test_a_marker_is_not_won_for_an_object_that_is_gone(cluster, name):
    store = cluster.store()
    create(store, name)
    store.remove([name], deadline=soon())
    assert store.take([name], deadline=soon()) is None
    assert vendor(cluster).exist([name + TAKEN]) == [False]


def test_closing_removes_what_was_taken(cluster, name):
    store, other = cluster.store(0), cluster.store(1)
    create(store, name)
    assert store.take([name], deadline=soon()) == name
    store.close()
    assert vendor(cluster, 1).exist([name]) == [False]
    with pytest.raises(ClosedError):
        store.exist([name], deadline=soon())
    assert other.exist([name], deadline=soon()) == [False]


# ---- overwriting


def test_a_replaced_object_is_seen_at_once_at_another_worker(cluster, name):
    here, there = cluster.store(0), cluster.store(1)
    for number in range(20):  # overwritten instead, the old bytes are seen elsewhere for up to 0.2 s
        here.replace(name, b"%d" % number, ttl_s=TTL_S, deadline=soon())
        assert there.load([name], deadline=soon()) == [b"%d" % number]


def test_objects_and_claims_are_two_kinds_and_who_mixes_them_is_told(cluster, name):
    """Trap: an object published over a claim fails, and takes the claim with it; the other way round nothing is lost."""
    store = cluster.store()
    store.claim(name, b"claimed", ttl_s=TTL_S, deadline=soon())
    with pytest.raises(OmniConnectorError, match="Invalid parameter"):
        create(store, name)
    assert store.load([name], deadline=soon()) == [None]
    create(store, name + "2")
    assert not store.claim(name + "2", b"claimed", ttl_s=TTL_S, deadline=soon())
    assert store.load([name + "2"], deadline=soon()) == [b"content"]


# ---- traps of the vendor's calls


def test_the_vendor_truncates_wide_memoryviews_and_we_do_not_use_them(cluster, name):
    wide = np.arange(8, dtype=np.float32)
    vendor(cluster).set(name, memoryview(wide))
    assert len(vendor(cluster).get([name])[0]) == 8  # of 32 bytes
    with cluster.connector(namespace=name) as connector:
        connector.put("k", memoryview(wide))
        assert np.array_equal(connector.get("k"), wide)


def test_the_vendor_refuses_empty_objects_and_empty_payloads_go_through(cluster, name):
    with pytest.raises(RuntimeError, match="bigger than zero"):
        vendor(cluster).set(name, b"")
    with cluster.connector(namespace=name) as connector:
        for number, payload in enumerate([b"", "", None, 0, [], {}, np.empty((0, 3))]):
            connector.put(f"k{number}", payload)
            found = connector.get(f"k{number}")
            assert type(found) is type(payload)
            assert np.shape(found) == np.shape(payload)


def test_an_unpublished_buffer_is_nobodys_and_its_memory_comes_back(cluster, name):
    """Trap: a put that dies between `mcreate` and `mset_buffer`."""
    store = cluster.store()
    before = used(store)
    for _ in range(10):  # three times what the worker holds
        buffers = eventually(lambda: allocated(store, name, 60 << 20))
        assert not store.exist([name], deadline=soon())[0]
        assert store.load([name], deadline=soon()) == [None]
        del buffers
    eventually(lambda: used(store) <= before + 1_000_000)


def allocated(store, name, nbytes):
    try:
        return store._open.client.mcreate([name], [nbytes])
    except RuntimeError:  # what was dropped is free a moment later
        return None


def test_what_a_killed_process_left_expires_in_the_worker(cluster, name):
    """Nobody sweeps it: the vendor's own time-to-live ends it, and its memory is free again."""
    store = cluster.store()
    before = used(store)
    host, port = cluster.service.addresses[0]
    done = subprocess.run([sys.executable, "-c", CREATE_AND_DIE, host, str(port), name], check=False)
    assert done.returncode == -signal.SIGKILL
    assert used(store) >= before + 20_000_000
    assert vendor(cluster).exist([name]) == [True]
    eventually(lambda: vendor(cluster).exist([name]) == [False], within_s=20)
    assert store.read(name, 20_000_000, shared=False, deadline=soon()) is None
    eventually(lambda: used(store) < before + 1_000_000, within_s=20)


CREATE_AND_DIE = """
import os, signal, sys
from omni_connector_core.deadline import Deadline
from omni_connector_core.store import NewObject
from omni_connector_yuanrong.options import YuanrongOptions
from omni_connector_yuanrong.store import YuanrongStore
host, port, name = sys.argv[1:]
store = YuanrongStore(YuanrongOptions(host=host, port=int(port)), deadline=Deadline(8))
store.create([NewObject(name, bytes(20_000_000))], ttl_s=2, deadline=Deadline(8))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_frame_that_cannot_be_written_leaves_nothing(cluster, name):
    class Broken(bytes):
        def __len__(self):
            return 8  # not so many as there are

    store = cluster.store()
    before = used(store)
    with pytest.raises(ValueError, match="different"):
        create(store, name, content=Broken(b"12345678901234567890"))
    assert not store.exist([name], deadline=soon())[0]
    gc.collect()
    eventually(lambda: used(store) <= before + 1_000_000)


# ---- room


def test_a_full_worker_says_so_and_takes_more_once_there_is_room(cluster, name):
    store = cluster.store()
    names = [f"{name}{number}" for number in range(100)]
    stored = []
    with pytest.raises(NoRoomError):
        for each in names:
            create(store, each, content=b"x" * 8_000_000)
            stored.append(each)
    assert 10 < len(stored) < 26
    assert store.exist(stored, deadline=soon()) == [True] * len(stored)  # none was thrown out
    with pytest.raises(NoRoomError):
        create(store, names[-1], content=b"x" * 8_000_000)
    store.remove(stored[:2], deadline=soon())

    def fits():
        try:
            create(store, names[-1], content=b"x" * 8_000_000)
        except NoRoomError:
            return False
        return True

    eventually(fits)
    store.remove([*stored, names[-1]], deadline=soon())


def test_a_full_worker_is_asked_without_holding_the_gil_for_long(cluster, name):
    """The vendor's client asks a full worker again and again for its whole timeout, with the GIL: ours asks how full it is."""
    store = cluster.store(request_timeout_s=2.0)
    stored = [f"{name}{number}" for number in range(30)]
    with pytest.raises(NoRoomError):  # its free memory lies in pieces: that it is full is found out once, with the GIL
        for each in stored:
            create(store, each, content=b"x" * 8_000_000)
    gaps = Gaps()
    with gaps:
        for _ in range(5):
            with pytest.raises(NoRoomError):
                create(store, name, content=b"x" * 8_000_000)
    assert gaps.longest_s < sdk.ATTEMPT_S * 0.8  # one question for memory that there is not takes all of ATTEMPT_S
    store.remove(stored, deadline=soon())


def test_a_record_that_finds_no_room_is_an_unavailable_service(cluster, name, monkeypatch):
    """Only payloads wait for room: a raw `NoRoomError` out of `fail` or a heartbeat would be nobody's."""
    store = cluster.store()

    def full(*_, **__):
        raise NoRoomError("full")

    monkeypatch.setattr(store, "create", full)
    with pytest.raises(BackendUnavailableError, match="no room for a record"):
        store.replace(name, b"x", ttl_s=1, deadline=soon())
    monkeypatch.setattr(store._open, "ask", full)
    with pytest.raises(BackendUnavailableError, match="no room for a record"):
        store.claim(name, b"x", ttl_s=1, deadline=soon())
    monkeypatch.undo()


def test_what_no_worker_can_hold_is_refused_at_once(cluster, name):
    store = cluster.store()
    deadline = Deadline(30)
    with pytest.raises(PayloadTooLargeError, match="worker that holds 201,326,592"):
        store.create([NewObject(name, bytes(300 << 20))], ttl_s=TTL_S, deadline=deadline)
    assert deadline.remaining_s() > 20


# ---- names and settings


def test_names_of_the_greatest_length_and_all_letters(cluster, name):
    store = cluster.store()
    longest = (name + ":=#-_aZ09" * 40)[: store.longest_name]
    create(store, longest)
    assert store.take([longest], deadline=soon()) == longest


def test_the_write_mode_is_the_vendors(cluster, name):
    evict = cluster.store(write_mode="none_l2_cache_evict", request_timeout_s=1.5)
    for number in range(40):  # more than there is room for: old ones go, which is why it is not the default
        create(evict, f"{name}{number}", content=b"x" * 8_000_000)
    assert not all(evict.exist([f"{name}{number}" for number in range(40)], deadline=soon()))
    evict.remove([f"{name}{number}" for number in range(40)], deadline=soon())


def test_a_worker_that_is_not_there_is_named_within_the_timeout():
    with pytest.raises(BackendUnavailableError, match=r"listens on 127\.0\.0\.1:9.*services up yuanrong"):
        sdk.Session(YuanrongOptions(port=9), Deadline(5))


def test_connecting_takes_no_longer_than_the_caller_waits(monkeypatch):
    waited = []

    def connect(address, timeout):
        waited.append(timeout)
        raise TimeoutError

    monkeypatch.setattr(sdk.socket, "create_connection", connect)
    with pytest.raises(BackendUnavailableError):
        sdk.Session(YuanrongOptions(connect_timeout_s=3.0), Deadline(0.1))
    assert waited[0] <= 0.1


def test_stores_of_one_worker_share_a_session_and_others_do_not(cluster):
    stores = [cluster.store(0), cluster.store(0), cluster.store(1), cluster.store(0, write_mode="none_l2_cache_evict")]
    assert len({id(store._open) for store in stores}) == 3


def test_no_thread_of_the_vendors_is_before_ours(cluster):
    """Trap: its I/O threads spin for locks of its others, at a nice of -15 where they may: on two busy cores for 0.4 s."""
    cluster.store(0)
    (daemon, *_) = cluster.service.daemons.values()
    for process in (os.getpid(), daemon.pid):
        own = os.getpriority(os.PRIO_PROCESS, process)
        threads = [int(thread) for thread in os.listdir(f"/proc/{process}/task")]
        assert min(os.getpriority(os.PRIO_PROCESS, thread) for thread in threads) >= own


@pytest.mark.parametrize(
    "text",
    [
        "code: [Client and Worker disconnect], msg: [The client id (63a4) does not exist.]",
        "code: [RPC unavailable], msg: [RPC unavailable. Client fd39 disconnected from worker.]",
    ],
)
def test_a_worker_that_lost_the_client_that_looks_still_answers(cluster, name, monkeypatch, text):
    """As seen on a busy host: the one client of three that only looks was lost, and the session with it, for good."""

    class Looker:
        def exist(self, names):
            raise RuntimeError(text)

    store = cluster.store(0)
    monkeypatch.setattr(store._open, "_looker", Looker())
    monkeypatch.setattr(store._open, "_suspect", True)
    assert store.exist([name], deadline=soon()) == [False]
    assert not store._open._suspect


def test_a_busy_worker_is_asked_for_its_health_again(cluster, monkeypatch):
    """As seen on a busy host: one attempt got no answer in time, and a worker that served was reported as ill."""

    class Status:
        def __init__(self, text):
            self.text = text

        def is_ok(self):
            return not self.text

        def to_string(self):
            return self.text

    class Client:
        def health_check(self):
            return answers.pop(0)

    answers = [Status("code: [RPC deadline exceeded]"), Status("")]
    store = cluster.store(0)
    monkeypatch.setattr(store._open, "client", Client())
    assert store.probe(deadline=soon()).startswith("health_check of the worker")
    answers += [Status("ill")] * 1000
    with pytest.raises(BackendUnavailableError, match="not healthy: ill"):
        store.probe(deadline=Deadline(0.3))


def test_an_error_keeps_no_frame_of_its_callers(cluster):
    """Or a view in one of them would be held until the collector comes."""
    store, here = cluster.store(0), object.__new__(type("Local", (), {}))
    seen = weakref.ref(here)

    def fails(local):
        def refuse():
            raise RuntimeError("code: [RPC unavailable], msg: [no]")

        with contextlib.suppress(BackendUnavailableError):
            store._open.call("nothing", refuse)
        return local is not None

    gc.disable()
    try:
        assert fails(here)
        del here
        assert seen() is None
    finally:
        gc.enable()


class Gaps:
    """Measures for how long a thread that wants to run every 0.2 ms does not get to."""

    def __enter__(self):
        self.longest_s, self._stop = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._tick)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _tick(self):
        last_s = time.monotonic()
        while not self._stop.is_set():
            time.sleep(2e-4)
            now_s = time.monotonic()
            self.longest_s, last_s = max(self.longest_s, now_s - last_s), now_s


def test_ctypes_views_are_aligned_for_every_dtype(cluster, name):
    store = cluster.store()
    create(store, name)
    assert ctypes.addressof(read(store, name)) % 64 == 0


# ---- without Ascend hardware


def test_the_transfer_engine_says_that_it_needs_ascend_hardware():
    with pytest.raises(BackendUnavailableError, match=r"libascendcl\.so.*engine: store"):
        create_connector("yuanrong", {"engine": "transfer"})


def test_the_transfer_engines_memory_is_pinned(monkeypatch):
    """Without hardware: the transport takes the hook that makes its memory, and the memory is what ACL returned."""
    memory = ctypes.create_string_buffer(1 << 16)

    class Acl:
        def aclrtSetDevice(self, device):
            return 0

        def aclrtMallocHost(self, pointer, nbytes):
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p))[0] = ctypes.addressof(memory)
            return 0

    monkeypatch.setattr(ascend, "require_ascend", Acl)
    options = OneSidedOptions(capacity_bytes=1 << 16)
    transport = ascend.AscendTransport(TransportContext(backend="yuanrong", options=options, namespace="namespace"))
    pool = transport._make_pool()
    assert (pool.address, pool.nbytes) == (ctypes.addressof(memory), 1 << 16)
    pool.part(8, 1)[0] = b"x"
    assert memory[8] == b"x"


def test_a_worker_that_was_full_and_gave_no_last_answer_is_full():
    """As seen on a busy host; the library asks again by itself, and its error is of the last time."""
    full = RuntimeError(
        "code: [RPC unavailable], msg: [[RPC_RECV_TIMEOUT] Rpc service for client has not responded within the allowed time."
        " RPC Retry detail: [ RPC unavailable * 1 Out of memory * 3 ] with 3 times in 500 ms.]"
    )
    assert sdk.kind_of(full) is NoRoomError
    gone = RuntimeError("code: [RPC unavailable], msg: [no worker]")
    assert sdk.kind_of(gone) is BackendUnavailableError

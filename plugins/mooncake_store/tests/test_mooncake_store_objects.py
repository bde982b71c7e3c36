"""What the protocol needs of Mooncake, between processes: exactly one winner, whole objects, and no silent loss."""

import itertools
import threading

import pytest

from omni_connector_contract_tests.harness.eventually import eventually
from omni_connector_contract_tests.harness.worker import Run
from omni_connector_core import Deadline, Producer, create_connector
from omni_connector_core.errors import CapacityError, ClosedError
from omni_connector_core.store import NewObject

RACES = 150


def objects_of(config, produces=True):
    from omni_connector_core.options import parse_options
    from omni_connector_mooncake_store.client import shared_client
    from omni_connector_mooncake_store.objects import MooncakeObjects
    from omni_connector_mooncake_store.options import MooncakeStoreOptions

    options = parse_options(MooncakeStoreOptions, config, backend="mooncake_store")
    deadline = Deadline(20)
    return MooncakeObjects(
        shared_client(options, deadline), capacity_bytes=1 << 24, produces=produces, deadline=deadline
    )


@pytest.fixture
def objects(mooncake_service):
    made = objects_of(mooncake_service.config())
    yield made
    made.close()


def race_for_claims(config, me):
    """Claim many names; return those won."""
    objects = objects_of(config)
    _kept.append(objects)  # its segment holds what it claimed
    return [n for n in range(RACES) if objects.claim(f"claim{n}", me, ttl_s=60, deadline=Deadline(20))]


def race_for_objects(config):
    """Take many objects; return those won."""
    objects = objects_of(config, produces=False)
    won = [n for n in range(RACES) if objects.take([f"take{n}"], deadline=Deadline(20)) is not None]
    objects.close()
    return won


_kept = []


def race(peers, function, *arguments):
    asked = [peers.get(name).start(Run(None, function, each, {})) for name, each in arguments]
    return [pending.result() for pending in asked]


def test_of_all_who_claim_a_name_one_wins(mooncake_service, mooncake_peers):
    config = mooncake_service.config()
    racers = [(f"racer {n}", (config, b"racer %d" % n)) for n in range(3)]
    won = race(mooncake_peers, race_for_claims, *racers)
    assert sorted(itertools.chain(*won)) == list(range(RACES))


def test_of_all_who_take_an_object_one_wins(mooncake_service, mooncake_peers, objects):
    config = mooncake_service.config()
    for n in range(RACES):
        objects.create([NewObject(f"take{n}", b"x")], ttl_s=60, deadline=Deadline(20))
    won = race(mooncake_peers, race_for_objects, *[(f"racer {n}", (config,)) for n in range(3)])
    assert sorted(itertools.chain(*won)) == list(range(RACES))


def test_a_reader_of_a_replaced_object_sees_old_or_new_or_nothing(objects):
    """Records carry a checksum all the same: Mooncake shows larger objects half overwritten."""
    values = [bytes([n]) * 200 for n in range(8)]
    objects.replace("record", values[0], ttl_s=60, deadline=Deadline(20))
    stop = threading.Event()

    def overwrite():
        n = 0
        while not stop.is_set():
            n += 1
            objects.replace("record", values[n % 8], ttl_s=60, deadline=Deadline(20))

    thread = threading.Thread(target=overwrite)
    thread.start()
    try:
        seen = {objects.load(["record"], deadline=Deadline(20))[0] for _ in range(500)}
    finally:
        stop.set()
        thread.join()
    assert seen - {None} <= set(values)
    assert len(seen - {None}) > 1


def test_several_objects_are_created_in_one_call_or_none_is(objects):
    objects.create([NewObject("a", b"1"), NewObject("b", b"22")], ttl_s=60, deadline=Deadline(20))
    assert objects.load(["a", "none", "b"], deadline=Deadline(20)) == [b"1", None, b"22"]
    assert objects.exist(["a", "none", "b"], deadline=Deadline(20)) == [True, False, True]
    objects.remove(["a", "none", "b"], deadline=Deadline(20))
    assert objects.exist(["a", "b"], deadline=Deadline(20)) == [False, False]


def test_purge_goes_by_the_prefix_alone(objects):
    names = ["x:1:a", "x:1:b", "x:10:a", "y:x:1:a"]
    objects.create([NewObject(name, b"1") for name in names], ttl_s=60, deadline=Deadline(20))
    objects.purge("x:1:", deadline=Deadline(20))
    assert objects.exist(names, deadline=Deadline(20)) == [False, False, True, True]


def test_an_object_that_is_there_but_of_another_size_is_not_read(objects):
    objects.create([NewObject("sized", b"12345")], ttl_s=60, deadline=Deadline(20))
    assert bytes(objects.read("sized", 5, shared=False, deadline=Deadline(20))) == b"12345"
    assert objects.read("sized", 6, shared=False, deadline=Deadline(20)) is None
    assert objects.read("missing", 5, shared=False, deadline=Deadline(20)) is None


def test_calls_after_close_raise_and_do_not_crash(mooncake_service):
    objects = objects_of(mooncake_service.config())
    objects.close()
    with pytest.raises(ClosedError):
        objects.exist(["a"], deadline=Deadline(20))
    with pytest.raises(ClosedError):
        objects.load(["a"], deadline=Deadline(20))
    with pytest.raises(ClosedError):
        objects.create([NewObject("a", b"1")], ttl_s=60, deadline=Deadline(20))


def test_nothing_is_evicted_when_the_store_is_full(ends):
    """Mooncake evicts what is not pinned, in silence; the payloads together are larger than the producer's room."""
    ends.producer.act(fill_up, 6 << 20)
    assert ends.consumer.act(read_all) == list(range(10))


def fill_up(acting, nbytes):
    import numpy as np

    for n in range(10):
        acting.connector.put(f"k{n}", np.full(nbytes, n, np.uint8))
    with pytest.raises(CapacityError):
        acting.connector.put("one more", np.zeros(nbytes, np.uint8), timeout=0.2)


def read_all(acting):
    views = [acting.connector.get(f"k{n}") for n in range(10)]
    return [int(view[0]) if (view == view[0]).all() else -1 for view in views]


def test_two_edges_of_one_process_keep_their_payloads_when_one_closes(mooncake_service):
    """They share a client, and so segments; the memory of a closed one must not go while the other has payloads in it."""
    config = {**mooncake_service.config(), "capacity_bytes": "32MiB"}
    first = create_connector("mooncake_store", config, namespace="shared segments", edge=("0", "1"))
    second = create_connector("mooncake_store", config, namespace="shared segments", edge=("1", "2"))
    for n in range(12):
        (first, second)[n % 2].put(f"k{n}", bytes([n]) * (2 << 20))
    first.close()
    for n in range(1, 12, 2):
        assert second.get(f"k{n}") == bytes([n]) * (2 << 20)
    second.close()


ROUND_TRIPS = {
    "put": ["create"],
    "get with metadata": ["read", "take"],
    "get by key": ["load", "exist", "read", "take"],
    "put, three readers": ["create"],
    "get, the first of three": ["read", "take", "exist"],
    "get, the last of three": ["read", "take", "exist", "remove"],
    "overwrite": ["exist", "create", "replace", "take", "take"],
    "a poll that finds nothing": ["load"],
}


def test_round_trips(mooncake_service, monkeypatch):
    """The table of `omni_connector_core.store.transport` is true."""
    from omni_connector_mooncake_store.objects import MooncakeObjects

    calls = []
    me = threading.get_ident()
    for name in ("create", "replace", "claim", "take", "load", "read", "exist", "remove"):

        def counted(self, *args, _name=name, _call=getattr(MooncakeObjects, name), **kwargs):
            if threading.get_ident() == me:
                calls.append(_name)
            return _call(self, *args, **kwargs)

        monkeypatch.setattr(MooncakeObjects, name, counted)
    seen = {}

    def step(what, act):
        calls.clear()
        result = act()
        seen[what] = list(calls)
        return result

    with create_connector("mooncake_store", mooncake_service.config(), namespace="round trips") as conn:
        conn.put("first", 1)
        conn.get("first")
        meta = step("put", lambda: conn.put("a", 1))
        step("get with metadata", lambda: conn.get("a", meta))
        conn.put("b", 1)
        step("get by key", lambda: conn.get("b", producer=None))
        meta = step("put, three readers", lambda: conn.put("c", 1, readers=3))
        step("get, the first of three", lambda: conn.get("c", meta))
        conn.get("c", meta)
        step("get, the last of three", lambda: conn.get("c", meta))
        conn.put("d", 1)
        step("overwrite", lambda: conn.put("d", 2, overwrite=True))
        conn.poll("nobody puts this", producer=Producer())
        step("a poll that finds nothing", lambda: conn.poll("nobody puts this", producer=Producer()))
    assert seen == ROUND_TRIPS


def test_the_keeper_gives_back_everything(mooncake_service):
    """Descriptors and reads of consumed payloads do not pile up."""
    from urllib.request import urlopen

    port = next(a for a in mooncake_service.daemons["master"].spec.argv if "metrics_port" in a).split("=")[1]

    def names():
        with urlopen(f"http://127.0.0.1:{port}/get_all_keys") as answer:
            return [name for name in answer.read().decode().split() if name.startswith("leftovers:")]

    with create_connector("mooncake_store", mooncake_service.config(), namespace="leftovers") as conn:
        for n in range(50):
            conn.put(f"k{n}", n, readers=2)
        assert len(names()) == 2 + 50 * 4, "slot and heartbeat; payload, two reads and descriptor of each"
        for n in range(50):
            assert conn.get(f"k{n}") == conn.get(f"k{n}") == n
        eventually(lambda: len(names()) == 3, message="slot, heartbeat and witness")
    assert names() == []

import multiprocessing
import secrets
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from omni_connector_core import TransferTimeoutError, create_connector
from omni_connector_core.services import free_ports

pytest.importorskip("mooncake.engine", exc_type=ImportError)

CONFIG = {"capacity_bytes": "64MiB"}


@pytest.fixture
def namespace():
    return f"te-{secrets.token_hex(4)}"


def produce(namespace, pipe):
    with create_connector("mooncake_te", CONFIG, namespace=namespace, role="producer") as connector:
        pipe.send(connector.put("numbers", np.arange(1_000_000)))
        pipe.recv()


def test_in_one_process(namespace):
    with create_connector("mooncake_te", CONFIG, namespace=namespace) as connector:
        connector.put("test_key", b"test_data")
        assert connector.get("test_key") == b"test_data"


def test_connectors_of_one_process_share_engine_and_arena(namespace):
    with (
        create_connector("mooncake_te", CONFIG, namespace=namespace, edge=("0", "1")) as first,
        create_connector("mooncake_te", CONFIG, namespace=namespace, edge=("1", "2")) as second,
    ):
        for connector in (first, second):
            connector.put("k", np.arange(100_000))
            assert (connector.get("k") == np.arange(100_000)).all()
        ours, theirs = first.transport._share(), second.transport._share()
        assert ours.hub is theirs.hub
        assert ours.arena is theirs.arena


@pytest.mark.parametrize("with_metadata", [True, False])
def test_across_processes(namespace, with_metadata):
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    producer = spawn.Process(target=produce, args=(namespace, theirs))
    producer.start()
    metadata = ours.recv()
    with create_connector("mooncake_te", CONFIG, namespace=namespace, role="consumer") as connector:
        got = connector.get("numbers", metadata if with_metadata else None, timeout=20)
    assert (got == np.arange(1_000_000)).all()  # after close
    ours.send("done")
    producer.join(20)
    assert producer.exitcode == 0


def test_a_cold_peer_is_found_by_its_address_alone(namespace, tmp_path, monkeypatch):
    port = free_ports(1)[0]
    with create_connector(
        "mooncake_te", {**CONFIG, "control_port": port}, namespace=namespace, role="producer"
    ) as producer:
        producer.put("k", np.arange(100_000))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # as on another host: nothing to be found here
        peers = {("0", 0, 0): f"127.0.0.1:{port}"}
        with create_connector("mooncake_te", CONFIG, namespace=namespace, role="consumer", peers=peers) as consumer:
            assert (consumer.get("k", timeout=20) == np.arange(100_000)).all()
        producer.put("l", "hinted")
        with create_connector("mooncake_te", CONFIG, namespace=namespace, role="consumer") as consumer:
            assert consumer.get("l", {"source_host": "127.0.0.1", "source_port": port}, timeout=20) == "hinted"


def test_peers_that_start_later_are_waited_for(namespace, tmp_path, monkeypatch):
    port = free_ports(1)[0]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    peers = {("0", 0, 0): f"127.0.0.1:{port}"}
    with (
        create_connector("mooncake_te", CONFIG, namespace=namespace, role="consumer", peers=peers) as consumer,
        ThreadPoolExecutor() as pool,
    ):
        waiting = pool.submit(consumer.get, "k", timeout=30)
        with pytest.raises(TransferTimeoutError):
            consumer.get("other", timeout=0.8)  # by now the first has been refused often
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ".."))
        config = {**CONFIG, "control_port": port}
        with create_connector("mooncake_te", config, namespace=namespace, role="producer") as producer:
            producer.put("k", "late")
            assert waiting.result(30) == "late"

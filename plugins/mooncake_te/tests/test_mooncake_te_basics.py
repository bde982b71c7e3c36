import multiprocessing
import secrets

import numpy as np
import pytest

from omni_connector_core import create_connector

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

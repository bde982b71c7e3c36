"""What each option of the Mooncake Store backend changes."""

import os
import sys
import time

import numpy as np
import pytest

from omni_connector_contract_tests.observed import observes, unobserved
from omni_connector_core import BackendUnavailableError, OptionError, PayloadTooLargeError, create_connector, rdma
from omni_connector_mooncake_store.options import MooncakeStoreOptions

NOBODY = "127.0.0.1:9"


@pytest.fixture
def connect(mooncake_service, request):
    """Return a function that opens a connector with options of its own."""
    made = []

    def give(**options):
        config = {**mooncake_service.config(), "capacity_bytes": "64MiB", **options}
        made.append(create_connector("mooncake_store", config, namespace=f"{request.node.name}-{os.getpid()}"))
        return made[-1]

    yield give
    for each in made:
        each.close()


@pytest.fixture
def adapters(tmp_path, monkeypatch):
    """A folder in which the backend looks for this host's RDMA adapters; there are none."""
    monkeypatch.setattr(rdma, "_INFINIBAND", tmp_path)
    return tmp_path


def refusal(connector):
    """What a put says that may take no time."""
    with pytest.raises(BackendUnavailableError) as caught:
        connector.put("k", 1, timeout=0)
    return str(caught.value)


def test_every_option_has_a_test():
    assert unobserved(MooncakeStoreOptions, sys.modules[__name__]) == []


@observes("master")
def test_the_master_is_the_one_that_was_named(connect, mooncake_service):
    connector = connect()
    connector.put("k", 1)
    assert f"of the master at {mooncake_service.config()['master']}" in connector.health().detail
    assert connector.get("k") == 1
    assert f"mooncake_master at {NOBODY} does not answer" in refusal(connect(master=NOBODY))


@observes("mode", "client")
def test_mode_shared_is_served_by_the_client_that_was_named(connect):
    assert f"mooncake_client at {NOBODY} does not answer" in refusal(connect(mode="shared", client=NOBODY))


@observes("metadata_server")
def test_a_metadata_server_that_was_named_is_asked(connect):
    server = f"http://{NOBODY}/metadata"
    with pytest.raises(
        BackendUnavailableError, match=f"mooncake_master at .*, or {server}, (does not answer|has not answered)"
    ):
        connect(metadata_server=server).put("k", 1, timeout=4.0)


@observes("host")
def test_others_reach_this_process_at_its_host(connect):
    for options, host in (({}, "127.0.0.1"), ({"host": "127.0.0.2"}, "127.0.0.2")):
        connector = connect(**options)
        connector.put("k", 1)
        assert connector.health().detail.startswith(f"client {host}:")
        assert connector.get("k") == 1


@observes("protocol", "device_name")
def test_rdma_without_the_adapter_is_an_error_that_names_it_at_once(connect, adapters):
    (adapters / "mlx5_0").mkdir()
    began_s = time.monotonic()
    with pytest.raises(OptionError, match="no RDMA adapter is called mlx5_none"):
        connect(protocol="rdma", device_name="mlx5_none").put("k", 1, timeout=60)
    assert time.monotonic() - began_s < 30  # no waiting brings an adapter


@observes("protocol")
def test_tcp_is_forced_as_mooncake_takes_an_adapter_that_it_finds(connect, monkeypatch):
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    connect(host="127.0.0.3").put("k", 1)
    assert os.environ["MC_FORCE_TCP"] == "1"


@observes("arena_bytes")
def test_what_is_larger_than_the_arena_cannot_be_received(connect):
    payload = np.zeros(40 << 20, np.uint8)
    for arena, fits in (("32MiB", False), ("64MiB", True)):
        connector = connect(arena_bytes=arena)
        connector.put(arena, payload)
        if fits:
            assert (connector.get(arena) == payload).all()
        else:
            with pytest.raises(PayloadTooLargeError, match="arena of 33,554,432"):
                connector.get(arena)
            connector.cleanup(arena)

"""What each option of the Yuanrong backend changes."""

import socket
import sys
import time

import pytest

from omni_connector_contract_tests.observed import observes, unobserved
from omni_connector_core import BackendUnavailableError, Deadline, OmniConnectorError, PeerLostError
from omni_connector_yuanrong.options import YuanrongOptions
from omni_connector_yuanrong.sdk import Session, open_session


def refused_s(call):
    """Seconds after which a call says that the worker does not answer."""
    start_s = time.monotonic()
    with pytest.raises(BackendUnavailableError):
        call()
    return time.monotonic() - start_s


def test_every_option_has_a_test():
    assert unobserved(YuanrongOptions, sys.modules[__name__]) == []


@observes("host", "port")
@pytest.mark.parametrize(
    ("options", "address"), [({"host": "127.0.0.2"}, r"127\.0\.0\.2:\d+"), ({"port": 9}, r"127\.0\.0\.1:9")]
)
def test_the_worker_is_looked_for_where_it_was_said_to_be(cluster, name, options, address):
    connector = cluster.connector(namespace=name, options=options)
    with pytest.raises(BackendUnavailableError, match=f"no datasystem worker listens on {address}"):
        connector.put("k", 1, timeout=0)


@observes("host", "port")
@pytest.mark.parametrize("worker", [0, 1])
def test_the_worker_that_is_used_is_the_one_that_was_named(cluster, name, worker):
    connector = cluster.connector(worker, namespace=name)
    connector.put("k", 1)
    assert "{}:{}".format(*cluster.service.addresses[worker]) in connector.health().detail
    assert connector.get("k") == 1


@observes("engine")
def test_the_transfer_engine_needs_ascend_hardware_and_says_so(cluster, name):
    with pytest.raises(BackendUnavailableError, match=r"engine: transfer needs libascendcl\.so"):
        cluster.connector(namespace=name, options={"engine": "transfer"})


@observes("connect_timeout_s")
def test_connecting_takes_as_long_as_it_may_and_no_longer():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        address = deaf.getsockname()
        with socket.create_connection(address):  # its backlog is full: who comes now is not answered
            short, long = (
                refused_s(lambda s=s: Session(YuanrongOptions(port=address[1], connect_timeout_s=s), Deadline(20)))
                for s in (0.2, 1.5)
            )
    assert short < 1.5 <= long


@observes("request_timeout_s")
def test_a_request_to_a_worker_that_hangs_takes_as_long_as_it_may_and_no_longer(cluster):
    options = [YuanrongOptions(**cluster.config(request_timeout_s=seconds)) for seconds in (0.2, 2.0)]
    sessions = [open_session(each, Deadline(8)) for each in options]
    cluster.service.daemons["worker0"].suspend()
    try:
        short, long = (refused_s(lambda s=s: s.ask("exist", lambda c: c.exist(["k"]), Deadline(20))) for s in sessions)
    finally:
        cluster.service.daemons["worker0"].resume()
    assert short < 2.0 <= long


@observes("write_mode")
def test_a_mode_that_writes_to_an_l2_store_needs_a_worker_with_one(cluster, name):
    connector = cluster.connector(namespace=name, options={"write_mode": "write_through_l2_cache"})
    with pytest.raises(OmniConnectorError, match="WRITE_THROUGH_L2_CACHE.*L2_cache_type is set to none"):
        connector.put("k", 1)


@observes("tenant_id")
def test_tenants_do_not_see_each_others_payloads(cluster, name):
    producer = cluster.connector(namespace=name, options={"tenant_id": "one"}, role="producer")
    metadata = producer.put("k", 1)
    stranger = cluster.connector(namespace=name, options={"tenant_id": "another"}, role="consumer")
    with pytest.raises(PeerLostError, match="lives.*as different tenants"):
        stranger.get("k", metadata, timeout=1)
    neighbour = cluster.connector(namespace=name, options={"tenant_id": "one"}, role="consumer")
    assert neighbour.get("k", metadata) == 1

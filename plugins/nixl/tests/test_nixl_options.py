"""What each option of the NIXL backend changes."""

import socket
import sys

import psutil
import pytest

from omni_connector_contract_tests.harness.acts import listening_ports
from omni_connector_contract_tests.one_sided_options import *  # noqa: F403
from omni_connector_core import BackendUnavailableError, create_connector
from omni_connector_nixl.options import NixlOptions

pytest.importorskip("nixl._api", exc_type=ImportError)


@pytest.fixture(scope="session")
def one_sided_backend():
    return Backend("nixl", {"capacity_bytes": "64MiB"})  # noqa: F405


def test_every_option_has_a_test():
    assert unobserved(NixlOptions, sys.modules[__name__]) == []  # noqa: F405


@observes("backends")  # noqa: F405
def test_the_backends_are_those_that_were_named():
    with (
        create_connector("nixl", {"backends": ["UCX", "UCXX"]}) as connector,
        pytest.raises(BackendUnavailableError, match="no backend 'UCXX'"),
    ):
        connector.put("k", 1)


def listening_addresses():
    return {address for address, _ in listening_ports()}


@observes("devices")  # noqa: F405
def test_ucx_uses_the_devices_that_were_named_and_no_other():
    elsewhere = {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    }
    for name, address in list(elsewhere.items())[:1]:
        before = listening_addresses()
        with create_connector("nixl", {"capacity_bytes": "64MiB", "tls": "tcp", "devices": name}) as connector:
            connector.put("k", 1)
            # and our own control channel, on loopback
            assert listening_addresses() - before - {"127.0.0.1"} == {address}
            assert connector.get("k") == 1
    with (
        create_connector("nixl", {"devices": "absent0"}) as connector,
        pytest.raises(BackendUnavailableError, match="(?s)did not start UCX.*See `devices` and `tls`"),
    ):
        connector.put("k", 1)


@observes("tls")  # noqa: F405
@pytest.mark.parametrize(("tls", "starts"), [("tcp", True), ("sm,tcp,self", True), ("carrier_pigeon", False)])
def test_ucx_uses_the_transports_that_were_named(tls, starts):
    with create_connector("nixl", {"capacity_bytes": "64MiB", "tls": tls}) as connector:
        if starts:
            connector.put("k", 1)
            assert connector.get("k") == 1
        else:
            with pytest.raises(BackendUnavailableError, match="(?s)did not start UCX.*See `devices` and `tls`"):
                connector.put("k", 1)

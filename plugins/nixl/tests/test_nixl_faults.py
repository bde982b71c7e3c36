"""Peers that hang, die, restart and crowd; pools that are full: over TCP, as the contract suite runs through shared memory."""

import pytest

from omni_connector_contract_tests.one_sided import *  # noqa: F403

pytest.importorskip("nixl._api", exc_type=ImportError)


@pytest.fixture(scope="session")
def one_sided_backend():
    return Backend("nixl", {"tls": "tcp"})  # noqa: F405

"""Two hosts: cuts, resets, loss, and bytes that must not arrive late."""

import pytest

from omni_connector_contract_tests.network import *  # noqa: F403

pytest.importorskip("nixl._api", exc_type=ImportError)


@pytest.fixture(scope="module")
def network_backend():
    return NetworkBackend("nixl", lambda address: {"host": address, "capacity_bytes": "600MiB"})  # noqa: F405

"""One master for all tests that do not harm it."""

import pytest

from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.peers import Peers

pytest.importorskip("mooncake.store", exc_type=ImportError)


@pytest.fixture(scope="session")
def mooncake_service():
    from omni_connector_mooncake_store.service import start

    with start() as service:
        yield service


@pytest.fixture(scope="session")
def mooncake_peers():
    peers = Peers(processes=True, patience_s=60)
    yield peers
    peers.shutdown()


@pytest.fixture
def ends(mooncake_service, mooncake_peers):
    made = Ends(Backend("mooncake_store", {**mooncake_service.config(), "capacity_bytes": "64MiB"}), mooncake_peers)
    yield made
    made.close()


@pytest.fixture
def own_ends():
    """Return a function that gives ends of a service that the test may harm, in processes of their own."""
    peers = Peers(processes=True, patience_s=60)
    made = []

    def give(service, **options):
        made.append(Ends(Backend("mooncake_store", {**service.config(), "capacity_bytes": "64MiB", **options}), peers))
        return made[-1]

    yield give
    for each in made:
        each.close()
    peers.shutdown()

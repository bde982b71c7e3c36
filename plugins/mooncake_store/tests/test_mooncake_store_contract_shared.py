"""The whole contract in mode ``shared``, over a real `mooncake_client`; `make test-contract-mooncake_store` runs mode ``client``."""

import dataclasses

import pytest

from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.suite import *  # noqa: F403
from omni_connector_core import plugin_manager
from omni_connector_mooncake_store.service import start

pytest.importorskip("mooncake.store", exc_type=ImportError)


@pytest.fixture(scope="session")
def connector_backend():
    spec = plugin_manager.spec("mooncake_store")
    # here the `mooncake_client` listens, and not the process
    capabilities = dataclasses.replace(spec.capabilities, loopback_only=True)
    with start(mode="shared") as service:
        yield Backend("mooncake_store", service.config(), dataclasses.replace(spec, capabilities=capabilities))

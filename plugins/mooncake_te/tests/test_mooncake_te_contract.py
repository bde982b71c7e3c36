"""The whole contract, over real engines in real processes."""

import pytest

from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.suite import *  # noqa: F403

pytest.importorskip("mooncake.engine", exc_type=ImportError)


@pytest.fixture(scope="session")
def connector_backend():
    return Backend("mooncake_te", {"capacity_bytes": "512MiB"})

"""The backend keeps the contract of omni-connector."""

import pytest

from omni_connector_contract_tests.suite import *  # noqa: F403 - the whole contract


@pytest.fixture(scope="session")
def connector_backend(tmp_path_factory: pytest.TempPathFactory) -> Backend:  # noqa: F405
    return Backend("my_backend", {"folder": str(tmp_path_factory.mktemp("my_backend"))})  # noqa: F405

"""The contract of omni-connector as tests, for any backend.

From any folder::

    pytest --pyargs omni_connector_contract_tests --connector NAME [--connector-config FILE] [--level N]

In a backend's own tests::

    import pytest
    from omni_connector_contract_tests.suite import *


    @pytest.fixture(scope="session")
    def connector_backend() -> Backend:
        return Backend("my_backend", {"folder": "/tmp/my_backend"})
"""

__version__ = "0.1.0"

"""Peers that hang, die, restart and crowd; pools that are full."""

import pytest

from omni_connector_contract_tests.one_sided import *  # noqa: F403

pytest.importorskip("mooncake.engine", exc_type=ImportError)


@pytest.fixture(scope="session")
def one_sided_backend():
    return Backend("mooncake_te")  # noqa: F405

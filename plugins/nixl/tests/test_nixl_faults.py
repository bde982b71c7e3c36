"""Peers that hang, die, restart and crowd; pools that are full: through shared memory and over TCP."""

import pytest

from omni_connector_contract_tests.one_sided import *  # noqa: F403

pytest.importorskip("nixl._api", exc_type=ImportError)


@pytest.fixture(scope="session", params=["all", "tcp"])
def one_sided_backend(request):
    return Backend("nixl", {"tls": request.param})  # noqa: F405

"""What each option of the Mooncake Transfer Engine backend changes."""

import sys

import pytest

from omni_connector_contract_tests.one_sided_options import *  # noqa: F403
from omni_connector_core import OptionError, create_connector, rdma
from omni_connector_mooncake_te.options import MooncakeTEOptions

pytest.importorskip("mooncake.engine", exc_type=ImportError)


@pytest.fixture(scope="session")
def one_sided_backend():
    return Backend("mooncake_te", {"capacity_bytes": "64MiB"})  # noqa: F405


@pytest.fixture
def adapters(tmp_path, monkeypatch):
    """A folder in which the backend looks for this host's RDMA adapters; there are none."""
    monkeypatch.setattr(rdma, "_INFINIBAND", tmp_path)
    return tmp_path


def test_every_option_has_a_test():
    assert unobserved(MooncakeTEOptions, sys.modules[__name__]) == []  # noqa: F405


@observes("protocol")  # noqa: F405
def test_rdma_without_an_adapter_is_an_error_at_start(adapters):
    with (
        create_connector("mooncake_te", {"protocol": "rdma"}) as connector,
        pytest.raises(OptionError, match="no RDMA adapter"),
    ):
        connector.put("k", 1)


@observes("device_name")  # noqa: F405
def test_an_adapter_that_is_not_there_is_named_beside_those_that_are(adapters):
    (adapters / "mlx5_0").mkdir()
    config = {"protocol": "rdma", "device_name": "mlx5_0,mlx5_9"}
    with (
        create_connector("mooncake_te", config) as connector,
        pytest.raises(OptionError, match="no RDMA adapter is called mlx5_9.*has mlx5_0"),
    ):
        connector.put("k", 1)

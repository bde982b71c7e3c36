"""Whether RDMA can work is found out before an engine says that it does."""

import pytest

from omni_connector_core import rdma
from omni_connector_core.errors import OptionError


@pytest.fixture
def adapters(tmp_path, monkeypatch):
    monkeypatch.setattr(rdma, "_INFINIBAND", tmp_path / "infiniband")
    return tmp_path / "infiniband"


def test_a_host_without_an_adapter_says_so(adapters):
    for names in ("", "mlx5_0"):
        with pytest.raises(OptionError, match="no RDMA adapter"):
            rdma.check_rdma(names)


def test_an_adapter_must_be_there_and_have_an_active_port(adapters):
    port = adapters / "mlx5_0/ports/1"
    port.mkdir(parents=True)
    port.joinpath("state").write_text("1: DOWN\n")
    with pytest.raises(OptionError, match="called mlx5_7") as caught:
        rdma.check_rdma("mlx5_0, mlx5_7")
    assert "mlx5_0" in caught.value.hint
    with pytest.raises(OptionError, match="no port of mlx5_0 is active"):
        rdma.check_rdma("")
    port.joinpath("state").write_text("4: ACTIVE\n")
    rdma.check_rdma("mlx5_0")
    rdma.check_rdma("")

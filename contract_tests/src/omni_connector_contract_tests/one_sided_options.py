"""Shows, for every one-sided backend, what each option of `OneSidedOptions` changes.

A backend's own tests of its options import this and say which backend is meant::

    from omni_connector_contract_tests.one_sided_options import *

    @pytest.fixture(scope="session")
    def one_sided_backend():
        return Backend("my_backend", {"capacity_bytes": "64MiB"})

What `capacity_bytes` changes is shown by the contract.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_connector_contract_tests.harness.acts import listening_ports
from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.observed import observes, unobserved
from omni_connector_core import OmniConnector, OptionError, PeerLostError, create_connector
from omni_connector_core.services import free_ports

__all__ = ["Backend", "TestOneSidedOptions", "observes", "unobserved"]

NUMBERS = np.arange(100_000)


class TestOneSidedOptions:
    """Where the control channel is bound, who may use it, and where the memory lies."""

    @pytest.fixture(autouse=True)
    def _opening(self, one_sided_backend: Backend) -> Iterator[None]:
        self.namespace = f"options-{secrets.token_hex(4)}"
        self._backend = one_sided_backend
        with ExitStack() as self._opened:
            yield

    def open(self, role: str, **options: Any) -> OmniConnector:
        """Open an end with these options."""
        connector = create_connector(
            self._backend.name, {**self._backend.config, **options}, namespace=self.namespace, role=role
        )
        return self._opened.enter_context(connector)

    @observes("host")
    def test_the_control_channel_is_bound_and_advertised_at_the_host(self) -> None:
        metadata = self.open("producer", host="127.0.0.2").put("k", NUMBERS)
        host, port = metadata["at"]["address"].removeprefix("tcp://").rsplit(":", 1)
        assert host == "127.0.0.2"
        assert (host, int(port)) in listening_ports()
        assert (self.open("consumer").get("k", metadata) == NUMBERS).all()

    @observes("control_port")
    def test_the_control_channel_is_bound_to_the_port(self) -> None:
        port = free_ports(1)[0]
        metadata = self.open("producer", control_port=port).put("k", NUMBERS)
        assert metadata["at"]["address"].endswith(f":{port}")
        assert ("127.0.0.1", port) in listening_ports()

    @observes("secret_file")
    def test_a_shared_secret_lets_in_who_knows_it(self, tmp_path: Path) -> None:
        paths = [tmp_path / "secret", tmp_path / "another"]
        for path in paths:
            path.write_text(secrets.token_hex(32))
            path.chmod(0o600)
        metadata = self.open("producer", secret_file=str(paths[0])).put("k", NUMBERS)
        for options in ({"secret_file": str(paths[1])}, {}):
            stranger = self.open("consumer", **options)
            with pytest.raises(PeerLostError, match="secret_file"):
                stranger.get("k", metadata, timeout=20)
        consumer = self.open("consumer", secret_file=str(paths[0]))
        assert (consumer.get("k", metadata, timeout=20) == NUMBERS).all()

    @observes("memory_pool_device")
    @pytest.mark.parametrize("device", ["pinned", "cuda"])
    def test_memory_of_a_device_that_is_not_there_is_refused(self, device: str) -> None:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this host has a CUDA device")
        with pytest.raises(OptionError, match=rf"memory_pool_device {device}.*CUDA"):
            self.open("producer", memory_pool_device=device).put("k", 1)

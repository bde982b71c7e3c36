"""The NIXL backend: `OneSidedTransport` over a `NixlEngine`."""

from __future__ import annotations

from collections.abc import Hashable

from omni_connector_core.capabilities import Capabilities
from omni_connector_core.onesided import Engine, OneSidedTransport
from omni_connector_nixl.engine import NixlEngine
from omni_connector_nixl.options import NixlOptions

__all__ = ["NixlTransport"]


class NixlTransport(OneSidedTransport):
    """Frames over NIXL: the consumer reads, by shared memory on one host, else by TCP or InfiniBand."""

    capabilities = Capabilities(cross_host=True, direct_get_into=True, hardened_ports=False)
    options: NixlOptions

    def engine_options(self) -> Hashable:
        """Connectors with the same backends, devices and transports share an agent."""
        options = self.options
        return self.host, tuple(options.backends), options.devices, options.tls

    def make_engine(self) -> Engine:
        """Start an agent."""
        options = self.options
        return NixlEngine(self.host, options.backends, devices=options.devices, tls=options.tls)

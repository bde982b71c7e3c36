"""The Mooncake Transfer Engine backend: `OneSidedTransport` over a `MooncakeEngine`."""

from __future__ import annotations

from collections.abc import Hashable

from omni_connector_core.capabilities import Capabilities
from omni_connector_core.onesided import Engine, OneSidedTransport
from omni_connector_mooncake_te.engine import MooncakeEngine
from omni_connector_mooncake_te.options import MooncakeTEOptions

__all__ = ["MooncakeTETransport"]


class MooncakeTETransport(OneSidedTransport):
    """Frames over the Transfer Engine: the consumer reads, over RDMA or TCP."""

    capabilities = Capabilities(cross_host=True, direct_get_into=True, loopback_only=False)
    options: MooncakeTEOptions

    def engine_options(self) -> Hashable:
        """Connectors with the same protocol and adapters share an engine."""
        return self.options.protocol, self.options.device_name

    def make_engine(self) -> Engine:
        """Start a Transfer Engine."""
        return MooncakeEngine(self.host, self.options.protocol, self.options.device_name)

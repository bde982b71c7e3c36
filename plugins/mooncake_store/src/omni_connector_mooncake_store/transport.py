"""The Mooncake Store backend: `StoreTransport` over a client of the store."""

from __future__ import annotations

from dataclasses import replace

from omni_connector_core.capabilities import Capabilities
from omni_connector_core.context import Role, TransportContext
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import OmniConnectorError
from omni_connector_core.store import ObjectStore, StoreTransport
from omni_connector_mooncake_store.client import leave, shared_client
from omni_connector_mooncake_store.objects import MooncakeObjects
from omni_connector_mooncake_store.options import MooncakeStoreOptions

__all__ = ["MooncakeStoreTransport"]


class MooncakeStoreTransport(StoreTransport):
    """Payloads in a Mooncake Store; see `omni_connector_mooncake_store.objects` for the copies."""

    capabilities = Capabilities(cross_host=True, loopback_only=False)
    options: MooncakeStoreOptions

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        if self.options.mode == "shared":  # the `mooncake_client` listens, and not this process
            self.capabilities = replace(self.capabilities, loopback_only=True)

    def _connect(self, *, deadline: Deadline) -> ObjectStore:
        client = shared_client(self.options, deadline)
        try:
            return MooncakeObjects(
                client,
                capacity_bytes=self.options.capacity_bytes,
                produces=self.context.role is not Role.CONSUMER,
                deadline=deadline,
            )
        except OmniConnectorError:
            leave(client)
            raise

"""The Mooncake Store backend: `StoreTransport` over a client of the store."""

from __future__ import annotations

from omni_connector_core.capabilities import Capabilities
from omni_connector_core.deadline import Deadline
from omni_connector_core.store import ObjectStore, StoreTransport
from omni_connector_core.transport import Role

from omni_connector_mooncake_store.connect import connect
from omni_connector_mooncake_store.options import MooncakeStoreOptions

__all__ = ["MooncakeStoreTransport"]


class MooncakeStoreTransport(StoreTransport):
    """Payloads in a Mooncake Store; see `omni_connector_mooncake_store.objects` for the copies."""

    capabilities = Capabilities(cross_host=True)
    options: MooncakeStoreOptions

    def _connect(self, *, deadline: Deadline) -> ObjectStore:
        produces = self.context.role is not Role.CONSUMER
        return connect(self.options, produces=produces, deadline=deadline)

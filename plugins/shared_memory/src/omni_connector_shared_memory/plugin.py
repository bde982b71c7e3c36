"""Registers the shared-memory backend."""

from omni_connector_core.capabilities import Capabilities
from omni_connector_core.plugins import BackendSpec, DropIn, hookimpl

CAPABILITIES = Capabilities(direct_get_into=True)


@hookimpl
def omni_connector_backend() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="shared_memory",
        summary="Between processes of one host: a pool of shared memory, one copy in and none out",
        transport="omni_connector_shared_memory.transport:SharedMemoryTransport",
        options="omni_connector_shared_memory.options:SharedMemoryOptions",
        capabilities=CAPABILITIES,
        install="pip install omni-connector-shared-memory",
        drop_in=DropIn(name="SharedMemoryConnector", options={"shm_threshold_bytes": None}),
    )

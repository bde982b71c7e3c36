"""Registers the in-process reference backend."""

from omni_connector_core.capabilities import Capabilities
from omni_connector_core.plugins import BackendSpec, hookimpl


@hookimpl
def omni_connector_backend() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="memory",
        summary="In one process: the reference that other backends are judged against",
        transport="omni_connector_core.memory.transport:MemoryTransport",
        options="omni_connector_core.memory.transport:MemoryOptions",
        capabilities=Capabilities(cross_process=False, zero_copy=False),
        install="pip install omni-connector-core",
    )

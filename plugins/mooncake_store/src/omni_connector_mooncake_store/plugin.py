"""Registers the backend."""

from omni_connector_core.capabilities import Capabilities
from omni_connector_core.plugins import BackendSpec, DropIn, hookimpl


@hookimpl
def omni_connector_backend() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="mooncake_store",
        summary="Mooncake Store: payloads in a distributed pool of host memory, over RDMA, TCP or shared memory",
        transport="omni_connector_mooncake_store.transport:MooncakeStoreTransport",
        options="omni_connector_mooncake_store.options:MooncakeStoreOptions",
        capabilities=Capabilities(cross_host=True, loopback_only=False),
        install="pip install 'omni-connector-mooncake-store[cpu]'",
        sdk="mooncake",
        service="omni_connector_mooncake_store.service:start",
        drop_in=DropIn(
            name="MooncakeStoreConnector",
            options={
                "master": "master",
                "metadata_server": "metadata_server",
                "host": "host",
                "segment": "capacity_bytes",
                "localbuf": "arena_bytes",
                "proto": "protocol",
                "rdma": "device_name",
            },
        ),
    )

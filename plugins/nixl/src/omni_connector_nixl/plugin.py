"""Registers the backend."""

from omni_connector_core.capabilities import Capabilities
from omni_connector_core.plugins import BackendSpec, DropIn, hookimpl


@hookimpl
def omni_connector_backend() -> BackendSpec:
    """Describe the backend."""
    ignored = (
        "num_threads agent_name receive_device memory_type lease_seconds transfer_timeout_s poll_interval_s sender_host "
        "handshake_timeout_ms metadata_query_timeout_ms handshake_max_wait_s handshake_retry_s sender_zmq_port"
    )
    return BackendSpec(
        name="nixl",
        summary="UCX through NIXL: the consumer reads the producer's memory, over shared memory, TCP or InfiniBand",
        transport="omni_connector_nixl.transport:NixlTransport",
        options="omni_connector_nixl.options:NixlOptions",
        capabilities=Capabilities(cross_host=True, direct_get_into=True, hardened_ports=False),
        install="pip install omni-connector-nixl && pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1",
        sdk="nixl",
        drop_in=DropIn(
            name="NixlConnector",
            options={
                "host": "host",
                "zmq_port": "control_port",
                "backends": "backends",
                **dict.fromkeys(ignored.split()),
            },
        ),
    )

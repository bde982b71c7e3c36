"""Registers the backend."""

from omni_connector_core.capabilities import Capabilities
from omni_connector_core.plugins import BackendSpec, DropIn, hookimpl


@hookimpl
def omni_connector_backend() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="mooncake_te",
        summary="Mooncake Transfer Engine: the consumer reads the producer's memory, over RDMA or TCP",
        transport="omni_connector_mooncake_te.transport:MooncakeTETransport",
        options="omni_connector_mooncake_te.options:MooncakeTEOptions",
        capabilities=Capabilities(cross_host=True, direct_get_into=True, loopback_only=False),
        install="pip install 'omni-connector-mooncake-te[cpu]'",
        sdk="mooncake",
        drop_in=DropIn(
            name="MooncakeTransferEngineConnector",
            options={
                "host": "host",
                "zmq_port": "control_port",
                "protocol": "protocol",
                "device_name": "device_name",
                "memory_pool_size": "capacity_bytes",
                "memory_pool_device": "memory_pool_device",
                "buffer_ttl_seconds": "ttl_s",
                "sender_host": None,
                "sender_zmq_port": None,
            },
        ),
    )

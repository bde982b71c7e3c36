"""Registers the backend; imports no SDK."""

from __future__ import annotations

from omni_connector_core.capabilities import Capabilities
from omni_connector_core.plugins import BackendSpec, DropIn, hookimpl

CAPABILITIES = Capabilities(cross_host=True)


@hookimpl
def omni_connector_backend() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="yuanrong",
        summary="openYuanrong datasystem: a store of the Ascend world; zero copy on the worker's host",
        transport="omni_connector_yuanrong.transport:open_transport",
        options="omni_connector_yuanrong.options:YuanrongOptions",
        capabilities=CAPABILITIES,
        install="pip install omni-connector-yuanrong",
        sdk="yr.datasystem",
        service="omni_connector_yuanrong.service:start",
        drop_in=DropIn(name="YuanrongConnector", options={"host": "host", "port": "port", "get_sub_timeout_ms": None}),
    )

"""omni-connector: carries what one stage of an omni-modal pipeline makes to the next.

::

    from omni_connector_core import create_connector

    conn = create_connector("shared_memory", config={})
    conn.put("test_key", b"test_data")
    assert conn.get("test_key") == b"test_data"
"""

from omni_connector_core import errors
from omni_connector_core.capabilities import Capabilities, Health, Usage
from omni_connector_core.connector import OmniConnector
from omni_connector_core.context import Peer, Role, TransportContext
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import *  # noqa: F403 - the error tree is part of the public interface
from omni_connector_core.factory import create_connector
from omni_connector_core.handles import NOT_READY, GetHandle, PutHandle
from omni_connector_core.key import Edge, Key, Producer
from omni_connector_core.metadata import Metadata
from omni_connector_core.plugins import BackendSpec, DropIn, hookimpl, plugin_manager
from omni_connector_core.transport import Transport

__all__ = [
    "NOT_READY",
    "BackendSpec",
    "Capabilities",
    "Deadline",
    "DropIn",
    "Edge",
    "GetHandle",
    "Health",
    "Key",
    "Metadata",
    "OmniConnector",
    "Peer",
    "Producer",
    "PutHandle",
    "Role",
    "Transport",
    "TransportContext",
    "Usage",
    "create_connector",
    "hookimpl",
    "plugin_manager",
]
__all__ += errors.__all__

__version__ = "0.1.0"

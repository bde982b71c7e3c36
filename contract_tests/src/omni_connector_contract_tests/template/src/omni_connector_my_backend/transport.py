"""The transport: every rule of the contract is `StoreTransport`'s, the objects are files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import cast

from omni_connector_core import Capabilities, Deadline
from omni_connector_core.store import StoreTransport
from omni_connector_my_backend.files import FileStore
from omni_connector_my_backend.options import MyBackendOptions
from omni_connector_my_backend.plugin import CAPABILITIES


class MyBackendTransport(StoreTransport):
    """Payloads in files. Copies: one at put, one at get."""

    capabilities: Capabilities = CAPABILITIES

    def _connect(self, *, deadline: Deadline) -> FileStore:
        options = cast(MyBackendOptions, self.options)
        shared = Path(tempfile.gettempdir()) / f"omni-connector-my-backend-{os.getuid()}"
        return FileStore(Path(options.folder) if options.folder else shared, options.capacity_bytes)

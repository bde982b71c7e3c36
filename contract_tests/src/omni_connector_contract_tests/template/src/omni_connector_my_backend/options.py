"""What a user can tell the backend."""

from __future__ import annotations

from dataclasses import dataclass

from omni_connector_core.options import Options, byte_size, option


@dataclass(frozen=True, kw_only=True)
class MyBackendOptions(Options):
    """Options of my_backend, beside those that every backend has. Each must change something that can be seen."""

    folder: str = option(default="", doc="Where the files lie; empty: a folder of this user in the temporary folder.")
    capacity_bytes: int = option(
        parse=byte_size, default="1GiB", doc="The most bytes of unread payloads that one producer holds."
    )

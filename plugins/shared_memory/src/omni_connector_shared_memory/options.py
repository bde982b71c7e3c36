"""The backend's options."""

from __future__ import annotations

from dataclasses import dataclass

from omni_connector_core.options import Options, byte_size, option

__all__ = ["SharedMemoryOptions"]


@dataclass(frozen=True, kw_only=True)
class SharedMemoryOptions(Options):
    """Options of the shared-memory backend."""

    capacity_bytes: int = option(
        parse=byte_size,
        default="8GiB",
        doc="The most bytes of payloads that one producer of one edge holds. Address space is reserved for them at once, "
        "memory is taken as it is needed.",
    )
    pool_bytes: int = option(
        parse=byte_size,
        default="16MiB",
        doc="Memory that is taken at the first put, and the smallest step by which the pool grows.",
    )
    pool_dir: str | None = option(
        default=None,
        doc="A folder on a tmpfs that accounts for the pool's memory. Without it the memory is anonymous (memfd), "
        "which no mount limits.",
    )
    runtime_dir: str | None = option(
        default=None,
        doc="Folder of the sockets by which the processes of an edge meet. Without it the environment's "
        "OMNI_CONNECTOR_RUNTIME_DIR, else /tmp/omni-connector-<uid>.",
    )

"""The options that every one-sided backend has."""

from __future__ import annotations

import re
from dataclasses import dataclass

from omni_connector_core.options import Options, at_least, byte_size, option

_DEVICE = re.compile(r"cpu|pinned|cuda(:\d+)?")


def _device(value: object) -> str:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise ValueError("expected cpu, pinned, cuda or cuda:N")
    return value


__all__ = ["OneSidedOptions"]


@dataclass(frozen=True, kw_only=True)
class OneSidedOptions(Options):
    """Options of the control channel and the arena."""

    host: str = option(
        default="127.0.0.1",
        doc="Address of this host that control channel and engine bind and advertise. `auto` takes the address of the default "
        "route. Loopback serves one host alone.",
    )
    control_port: int = option(
        parse=at_least(0),
        default=0,
        doc="Port of the control channel; 0 takes a free one, which metadata and, on one host, the runtime folder make known. So "
        "does a port that is taken, with a warning.",
    )
    secret_file: str | None = option(
        default=None,
        doc="File with a shared secret, mode 600: every control connection and message is then authenticated (HMAC). Neither messages "
        "nor payloads are encrypted.",
    )
    capacity_bytes: int = option(
        parse=byte_size,
        default="1GiB",
        doc="Registered memory of this process for what it puts and receives, shared by its connectors. Host memory is touched, "
        "and so occupied, only as far as it is used.",
    )
    memory_pool_device: str = option(
        parse=_device,
        default="cpu",
        doc="Where that memory lies: `cpu`, `pinned` (host memory that a GPU copies fast; needs CUDA), or `cuda[:N]` (device memory, "
        "for engines with GPUDirect RDMA).",
    )

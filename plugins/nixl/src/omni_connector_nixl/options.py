"""Options of the NIXL backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omni_connector_core.onesided import OneSidedOptions
from omni_connector_core.options import option

__all__ = ["NixlOptions"]


def _names(value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("expected the name of a NIXL backend, or a list of names")
    return list(names)


@dataclass(frozen=True, kw_only=True)
class NixlOptions(OneSidedOptions):
    """Options of the NIXL backend."""

    backends: list[str] = option(
        parse=_names,
        default=["UCX"],
        doc="NIXL backends that may move the bytes, the preferred one first. Both ends need one in common.",
    )
    devices: str = option(
        default="",
        doc="Network devices that UCX may use, as in UCX_NET_DEVICES (`mlx5_0:1,mlx5_1:1` for InfiniBand). Empty: `lo` when "
        "`host` is loopback, else UCX_NET_DEVICES, else all.",
    )
    tls: str = option(
        default="",
        doc="UCX transports, as in UCX_TLS (`tcp`, `rc,sm,self`). Empty: UCX_TLS, else all, of which UCX takes the fastest "
        "for each peer: shared memory on one host.",
    )

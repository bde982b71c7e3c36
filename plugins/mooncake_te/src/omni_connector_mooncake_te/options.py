"""Options of the Mooncake Transfer Engine backend."""

from __future__ import annotations

from dataclasses import dataclass

from omni_connector_core.onesided import OneSidedOptions
from omni_connector_core.options import one_of, option

__all__ = ["MooncakeTEOptions"]


@dataclass(frozen=True, kw_only=True)
class MooncakeTEOptions(OneSidedOptions):
    """Options of the Mooncake Transfer Engine backend."""

    protocol: str = option(
        parse=one_of("tcp", "rdma"),
        default="tcp",
        doc="`rdma` in production, `tcp` everywhere. RDMA without an active adapter is an error at start.",
    )
    device_name: str = option(
        default="", doc="RDMA adapters to use, comma-separated (`mlx5_0,mlx5_1`); empty: all that the engine finds."
    )

"""What a deployment can tell the backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omni_connector_core.options import Options, at_least, byte_size, one_of, option

__all__ = ["WRITE_MODES", "YuanrongOptions"]

WRITE_MODES = ("none_l2_cache", "write_through_l2_cache", "write_back_l2_cache", "none_l2_cache_evict")


def _port(value: Any) -> int:
    if type(value) is not int or not 0 < value < 65536:
        raise ValueError("a port is an int from 1 to 65535")
    return value


def _capacity(value: Any) -> int | None:
    return None if value is None else byte_size(value)


@dataclass(frozen=True, kw_only=True)
class YuanrongOptions(Options):
    """Options of the backend ``yuanrong``."""

    host: str = option(default="127.0.0.1", doc="Address of this host's datasystem worker.")
    port: int = option(parse=_port, default=31501, doc="Port of this host's datasystem worker.")
    engine: str = option(
        parse=one_of("store", "transfer"),
        default="store",
        doc="`store`: payloads lie in the workers. `transfer`: one-sided reads between NPUs, needs Ascend hardware.",
    )
    capacity_bytes: int | None = option(
        parse=_capacity,
        default=None,
        doc="Most bytes that this process may have unread in the workers; `null`: as much as its worker holds.",
    )
    connect_timeout_s: float = option(
        parse=at_least(0.1), default=3.0, doc="Longest time to connect to the worker, seconds."
    )
    request_timeout_s: float = option(
        parse=at_least(0.05),
        default=2.0,
        doc="Longest time of one request to the worker, seconds. A worker that hangs blocks all Python threads for so "
        "long: the vendor's client holds the GIL.",
    )
    write_mode: str = option(
        parse=one_of(*WRITE_MODES),
        default="none_l2_cache",
        doc="What the worker does with a payload besides keeping it in memory. The two `l2` modes need a worker with "
        "an L2 store. `none_l2_cache_evict` lets a full worker throw unread payloads away without a word.",
    )
    tenant_id: str = option(
        default="", doc="Tenant under which objects are kept, where the workers tell tenants apart."
    )

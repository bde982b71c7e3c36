"""Mooncake's Python module, imported with bounded waits; its error codes, mapped to errors of ours.

The library reads its environment when it is loaded, so the first import in a process decides. What the user has set stays.
"""

from __future__ import annotations

import os

from omni_connector_core.errors import BackendUnavailableError, OmniConnectorError, PluginError
from omni_connector_core.store import NoRoomError

__all__ = [
    "BAD_PARAMETER",
    "CALL_S",
    "LEASE_EXPIRED",
    "MISSING",
    "NOT_READY",
    "NO_SPACE",
    "TRANSFER_S",
    "MooncakeDistributedStore",
    "ReplicateConfig",
    "error",
    "force_tcp",
]

_CONNECT_MS, _RPC_MS, _TRANSFER_S = 2000, 3000, 30

_ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
    "MC_RPC_CONNECT_TIMEOUT_MS": str(_CONNECT_MS),
    "MC_RPC_TIMEOUT_MS": str(_RPC_MS),
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    # below these bytes arrive late in memory that a failed call seemed to have given back (`facts/multi_host`)
    "MC_TRANSFER_TIMEOUT": str(_TRANSFER_S),
}

if "MC_LOG_DIR" in os.environ:
    raise PluginError(
        "MC_LOG_DIR is set: importing mooncake would abort this process", hint="Unset it; logs go to stderr"
    )
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # noqa: E402

CALL_S = (_CONNECT_MS + _RPC_MS) / 1000 + 1.0
"""The longest that one call to the master takes, seconds."""
TRANSFER_S = _TRANSFER_S + 2 * CALL_S
"""The longest that a call takes which also moves bytes between hosts, seconds."""

NO_SPACE, BAD_PARAMETER = -200, -600
NOT_READY, MISSING, LEASED, LEASE_EXPIRED = -703, -704, -706, -707
TRANSFER_FAILED, RPC_FAILED, RPC_TIMEOUT = -800, -900, -901

_MEANINGS = {
    NO_SPACE: "no segment has room",
    BAD_PARAMETER: "bad parameters",
    NOT_READY: "the object is being written",
    MISSING: "no such object",
    LEASED: "the object is leased",
    LEASE_EXPIRED: "the transfer took longer than the lease",
    TRANSFER_FAILED: "the process that keeps the object does not answer",
    RPC_FAILED: "the master does not answer",
    RPC_TIMEOUT: "the master did not answer in time",
}
_HINTS = {
    LEASE_EXPIRED: "Start mooncake_master with a longer --default_kv_lease_ttl (10 s or more)",
    TRANSFER_FAILED: "It died, is stopped, or the network between the hosts is cut",
    RPC_FAILED: "Start it: omni-connector services up mooncake_store, and set the option master",
    RPC_TIMEOUT: "It is stopped or overloaded, or the network is cut",
}


def error(operation: str, code: int, *, shared: bool = False) -> OmniConnectorError | NoRoomError:
    """Return the error that a negative code of the SDK means.

    Parameters
    ----------
    shared
        The call went to a `mooncake_client`, which calls memory of ours a bad parameter until it knows it again after a restart.
    """
    text = f"{operation}: {_MEANINGS.get(code, 'unknown error')} (code {code})"
    if code == NO_SPACE:
        return NoRoomError(text)
    if code == LEASED or (code == BAD_PARAMETER and not shared):  # ours to avoid
        return OmniConnectorError(text, hint="This is a bug in omni-connector-mooncake-store; please report it")
    return BackendUnavailableError(text, hint=_HINTS.get(code))


def force_tcp() -> None:
    """Keep Mooncake from taking an RDMA adapter that it finds although it was told tcp."""
    os.environ["MC_FORCE_TCP"] = "1"

"""Whether RDMA can work on this host: Mooncake's engines start without an adapter, and fail at the first transfer."""

from __future__ import annotations

from pathlib import Path

from omni_connector_core.errors import OptionError

__all__ = ["check_rdma"]

_INFINIBAND = Path("/sys/class/infiniband")


def check_rdma(device_name: str) -> None:
    """Find out whether the RDMA adapters of that name, separated by commas, are there and active; empty: whichever there are.

    Raises
    ------
    OptionError
        No adapter, not the named one, or none with an active port.
    """
    found = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    wanted = [name.strip() for name in device_name.split(",") if name.strip()] or found
    if not found:
        raise OptionError(
            "protocol rdma, but this host has no RDMA adapter", hint="Use protocol tcp, or load the adapter's driver"
        )
    missing = [name for name in wanted if name not in found]
    if missing:
        raise OptionError(
            f"no RDMA adapter is called {', '.join(missing)}", hint=f"This host has {', '.join(found)}: see device_name"
        )
    states = {name: [p.read_text() for p in _INFINIBAND.joinpath(name).glob("ports/*/state")] for name in wanted}
    if not any("ACTIVE" in state for ports in states.values() for state in ports):
        raise OptionError(
            f"no port of {', '.join(wanted)} is active", hint="`ibstat` shows cable, link and subnet manager"
        )

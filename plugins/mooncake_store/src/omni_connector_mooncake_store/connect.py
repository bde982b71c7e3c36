"""Opening a client of the Mooncake Store: an own one, or the shared one of this host."""

from __future__ import annotations

import ctypes
from typing import Any

from omni_connector_core.arena import HostMemory, Pool
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import BackendUnavailableError

from omni_connector_mooncake_store import sdk
from omni_connector_mooncake_store.calls import Calls
from omni_connector_mooncake_store.objects import MooncakeObjects
from omni_connector_mooncake_store.options import MooncakeStoreOptions, host_towards

__all__ = ["connect"]

SDK_BUFFER_NBYTES = 16 << 20
"""Mooncake's own buffer, which only calls that we do not make go through; its default."""
SEGMENT_SLACK_NBYTES = 16 << 20
"""For small objects and the allocator's gaps, beside the payloads."""
SETUP_S = 15.0
"""The longest that a setup takes, seconds."""
START_HINT = "Start it: omni-connector services up mooncake_store, and paste the options that it prints"


class SharedPool:
    """Memory that this host's `mooncake_client` shares with this process; lives as long as a part of it is in use."""

    def __init__(self, client: sdk.MooncakeDistributedStore, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address: int = client.alloc_from_mem_pool(nbytes)
        if not self.address:
            raise BackendUnavailableError(
                f"mooncake_client did not grant {nbytes:,} bytes of shared memory",
                hint="Lower arena_bytes, or give /dev/shm more room",
            )
        self._client = client

    def part(self, offset: int, nbytes: int) -> Any:
        """Return a ctypes array over a part."""
        array = (ctypes.c_char * nbytes).from_address(self.address + offset)
        array.pool = self  # type: ignore[attr-defined]
        return array


def connect(options: MooncakeStoreOptions, *, produces: bool, deadline: Deadline) -> MooncakeObjects:
    """Open a client.

    Parameters
    ----------
    produces
        Whether this process puts payloads, and so brings a segment for them.

    Raises
    ------
    BackendUnavailableError
        The master or the client does not answer, or an adapter is missing; says which.
    """
    return _shared(options, deadline) if options.mode == "shared" else _own(options, produces, deadline)


def _own(options: MooncakeStoreOptions, produces: bool, deadline: Deadline) -> MooncakeObjects:
    rdma = options.protocol == "rdma"
    if rdma:
        sdk.check_rdma(options.device_name)
    else:
        sdk.force_tcp()
    host = _host(options)
    segment = options.capacity_bytes + SEGMENT_SLACK_NBYTES if produces else 0
    client = sdk.MooncakeDistributedStore()
    _setup(
        lambda: client.setup(
            host,
            options.metadata_server,
            segment,
            SDK_BUFFER_NBYTES,
            options.protocol,
            options.device_name,
            options.master,
        ),
        f"mooncake_master at {options.master}",
        deadline,
    )
    name: str = client.get_hostname()
    return MooncakeObjects(
        client,
        HostMemory(options.arena_bytes),
        own_segment=name if produces else None,
        capacity_bytes=options.capacity_bytes,
        staged=rdma,
        pings=True,
        detail=f"client {name} of the master at {options.master}, over {options.protocol}",
    )


def _shared(options: MooncakeStoreOptions, deadline: Deadline) -> MooncakeObjects:
    client = sdk.MooncakeDistributedStore()
    _setup(
        lambda: client.setup_dummy(options.arena_bytes, SDK_BUFFER_NBYTES, options.client),
        f"mooncake_client at {options.client}",
        deadline,
    )
    pool: Pool = SharedPool(client, options.arena_bytes)
    return MooncakeObjects(
        client,
        pool,
        own_segment=None,
        capacity_bytes=options.capacity_bytes,
        staged=True,
        pings=False,
        detail=f"over shared memory with the mooncake_client at {options.client}",
    )


def _host(options: MooncakeStoreOptions) -> str:
    if options.host != "auto":
        return options.host
    try:
        return host_towards(options.master)
    except OSError as error:
        raise BackendUnavailableError(
            f"no route to the master at {options.master}: {error}", hint="Set the option master, or host"
        ) from error


def _setup(setup: Any, service: str, deadline: Deadline) -> None:
    calls = Calls()
    code = calls.run(setup, longest_s=SETUP_S, deadline=deadline)
    calls.close(Deadline(0))
    if code:
        raise BackendUnavailableError(f"{service} does not answer (code {code})", hint=START_HINT)

"""One client of the Mooncake Store for a process: connecting takes 50 ms, disconnecting two seconds, and each has 25 threads.

Connectors with equal options share it. It is opened by the first and stays until the process ends, or stops the service that it
started itself; memory does not: the segments in which producers keep their payloads are mounted for each, and unmounted when
the last has gone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from omni_connector_core.arena import Arena, HostMemory, Pool, Region
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import BackendUnavailableError, OmniConnectorError
from omni_connector_core.rdma import check_rdma
from omni_connector_core.services import before_stop
from omni_connector_mooncake_store import sdk
from omni_connector_mooncake_store.calls import SHORTEST_S, Calls
from omni_connector_mooncake_store.options import MooncakeStoreOptions, address, host_towards
from omni_connector_mooncake_store.pages import huge_pages

__all__ = ["Client", "leave", "shared_client"]

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_NO_SERVER = "P2PHANDSHAKE"
UNREACHABLE = 2
"""`health_check`: the master does not answer its pings. Costs 1 us; any other call would take seconds to find out."""
SDK_BUFFER_NBYTES = 16 << 20
"""Mooncake's own buffer, which only calls that we do not make go through; its default."""
SMALL_NBYTES = 16 << 20
"""Room for small objects and the allocator's gaps, beside the payloads."""
RECONNECT_S = 2.0
"""Shortest time between two connections to a `mooncake_client`, seconds."""
SETUP_S = 15.0
"""The longest that a setup takes, seconds."""
START_HINT = "Start it: omni-connector services up mooncake_store, and paste the options that it prints"


class Client:
    """A connected client, its arena, and its segments. Thread-safe.

    Attributes
    ----------
    sdk
        Mooncake's object.
    calls
        Through which everything on `sdk` is called.
    shared
        Whether it is the host's `mooncake_client`.
    staged
        Whether what is put must lie in the arena.
    users
        How many connectors use it.
    name
        How the master names this client's segments; None in mode ``shared``, where they are the `mooncake_client`'s.
    detail
        What the client is connected to, for an operator to read.
    """

    def __init__(self, options: MooncakeStoreOptions, deadline: Deadline) -> None:
        self.shared = options.mode == "shared"
        service = f"mooncake_client at {options.client}" if self.shared else f"mooncake_master at {options.master}"
        others = "" if self.shared or options.metadata_server == _NO_SERVER else f", or {options.metadata_server},"
        self._service = service
        self._asked = service + others
        self.calls = Calls(self._asked)
        self._options = options
        self._retired: list[object] = []
        self._segments: list[str] = []
        self._small: list[str] = []
        self._mounted = self._reserved = 0
        self._late: list[Region] = []
        self._lock = threading.Lock()
        self.users = 0
        self.name: str | None = None
        self._connect(deadline)

    def _connect(self, deadline: Deadline) -> None:
        options = self._options
        _reach(options.client if self.shared else options.master, self._service, deadline)
        self.sdk = sdk.MooncakeDistributedStore()
        setup = self._setup_shared if self.shared else self._setup_own
        code = setup(options, deadline)
        if code:
            raise BackendUnavailableError(f"{self._asked} does not answer (code {code})", hint=START_HINT)
        self._arena = self._new_arena()
        self._connected_s = time.monotonic()

    def reconnect(self) -> None:
        """In mode ``shared``: connect again to a `mooncake_client` that was restarted and does not know our memory.

        The old connection stays as it is: views of its memory may be in use.
        """
        with self._lock:
            if time.monotonic() - self._connected_s > RECONNECT_S:
                self._retired.append((self.sdk, self._arena))
                log.warning("%s does not know this process; connecting anew", self._service)
                self._connect(Deadline(RECONNECT_S))

    def _setup_own(self, options: MooncakeStoreOptions, deadline: Deadline) -> int:
        self.staged = options.protocol == "rdma"
        if self.staged:
            check_rdma(options.device_name)
        else:
            sdk.force_tcp()
        try:
            host = host_towards(options.master) if options.host == "auto" else options.host
        except OSError as error:
            raise BackendUnavailableError(
                f"no route to the master at {options.master}: {error}", hint="Set the option master, or host"
            ) from error
        arguments = (
            host,
            options.metadata_server,
            0,
            SDK_BUFFER_NBYTES,
            options.protocol,
            options.device_name,
            options.master,
        )
        code: int = self.calls.run(lambda: self.sdk.setup(*arguments), longest_s=SETUP_S, deadline=deadline)
        if not code:
            self.name = self.sdk.get_hostname()
            self.detail = f"client {self.name} of the master at {options.master}, over {options.protocol}"
        return code

    def _setup_shared(self, options: MooncakeStoreOptions, deadline: Deadline) -> int:
        self.staged = True
        self.detail = f"over shared memory with the mooncake_client at {options.client}"
        arguments = options.arena_bytes, SDK_BUFFER_NBYTES, options.client
        code: int = self.calls.run(lambda: self.sdk.setup_dummy(*arguments), longest_s=SETUP_S, deadline=deadline)
        return code

    def _new_arena(self) -> Arena:
        nbytes = self._options.arena_bytes
        pool: Pool = _SharedPool(self.sdk, nbytes) if self.shared else HostMemory(nbytes)
        arena = Arena(pool)
        code = self.sdk.register_buffer(arena.address, arena.nbytes)
        if code:
            raise sdk.error("register_buffer", code)
        return arena

    def close(self) -> bool:
        """Disconnect, unless that is not safe: Mooncake crashes on a call after its end. Takes up to 2 s, with the GIL held."""
        with self._lock:
            views = self.shared and (self._retired or self.used_bytes)  # of memory that would go
            if self.users or self.calls.under_way or views:
                return False
            self.sdk.close()
            return True

    # ---- calls

    def check(self) -> None:
        """Refuse at once what would take seconds.

        Raises
        ------
        BackendUnavailableError
            The master does not answer this client's pings.
        """
        # a shared client does not ping: its first health_check is always UNREACHABLE
        if not self.shared and self.sdk.health_check() == UNREACHABLE:
            raise sdk.error("health_check", sdk.RPC_FAILED)

    # ---- the arena

    def allocate(self, nbytes: int, deadline: Deadline) -> Region:
        """Take a region of registered memory.

        Raises
        ------
        CapacityError, PayloadTooLargeError
        """
        return self._arena.allocate(nbytes, deadline)

    def release(self, region: Region) -> None:
        """Give a region back."""
        region.arena.release(region)

    def call_with(
        self,
        region: Region,
        call: Callable[[], ResultT],
        longest_s: float,
        deadline: Deadline,
        *,
        overdue: type[OmniConnectorError] = BackendUnavailableError,
    ) -> ResultT:
        """Run a call that uses a region, and give the region back when the call has ended."""
        result = self.calls.run(
            call, longest_s=longest_s, deadline=deadline, late=lambda _: self.release(region), overdue=overdue
        )
        self.release(region)
        return result

    def quarantine(self, region: Region) -> None:
        """Never hand out a region again: a transfer that failed may still write to it for as long as the client lives.

        When half of the arena has gone that way, a new one takes its place.
        """
        with self._lock:
            self._late.append(region)
            lost = sum(late.size for late in self._late if late.arena is self._arena)
            if 2 * lost > self._arena.nbytes:
                log.warning("%d bytes of the arena are in quarantine after failed transfers; taking a new arena", lost)
                self._arena = self._new_arena()

    @property
    def quarantined_bytes(self) -> int:
        """Bytes in quarantine."""
        return sum(region.size for region in self._late)

    @property
    def used_bytes(self) -> int:
        """Bytes of the arena that are handed out, or in quarantine."""
        return self._arena.used_bytes

    # ---- segments

    def reserve(self, nbytes: int, deadline: Deadline) -> None:
        """Mount room for a producer's payloads, in whatever segments this client has.

        Raises
        ------
        BackendUnavailableError
        """
        if self.shared:
            return
        with self._lock:
            if self._mounted < self._reserved + nbytes:
                self._segments += self._mount(nbytes + SMALL_NBYTES, deadline)
                self._mounted += nbytes
            self._reserved += nbytes

    def mount_small(self, deadline: Deadline) -> None:
        """Mount room for the small objects of a process that puts no payloads; once, and for as long as it runs."""
        with self._lock:
            if not self.shared and not self._small:
                self._small = self._mount(SMALL_NBYTES, deadline)

    def _mount(self, nbytes: int, deadline: Deadline) -> list[str]:
        with huge_pages(nbytes):
            answer: dict[str, Any] = self.calls.run(
                lambda: self.sdk.allocate_and_mount_segment(nbytes, self._options.protocol),
                longest_s=SETUP_S,
                deadline=deadline,
            )
        if answer["ret"]:
            raise sdk.error("mount_segment", answer["ret"])
        ids: list[str] = answer["segment_ids"]
        return ids

    def unreserve(self, nbytes: int, deadline: Deadline) -> None:
        """Give a producer's room back; when nobody has any left, unmount all of it."""
        if self.shared:
            return
        with self._lock:
            self._reserved -= nbytes
            if self._reserved:
                return  # payloads of the others may lie in any of the segments
            segments, self._segments, self._mounted = self._segments, [], 0
        self.calls.run(lambda: self.sdk.unmount_and_free_segment(segments), longest_s=SETUP_S, deadline=deadline)


def _reach(where: str, service: str, deadline: Deadline) -> None:
    """See whether anybody listens: a setup that waits for a service holds the GIL for 4.4 s."""
    try:
        socket.create_connection(address(where), timeout=max(deadline.remaining_s(), SHORTEST_S)).close()
    except OSError as error:
        raise BackendUnavailableError(f"{service} does not answer: {error}", hint=START_HINT) from error


class _SharedPool(Pool):
    """Memory that this host's `mooncake_client` shares with this process."""

    def __init__(self, client: sdk.MooncakeDistributedStore, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address: int = client.alloc_from_mem_pool(nbytes)
        if not self.address:
            raise BackendUnavailableError(
                f"mooncake_client did not grant {nbytes:,} bytes of shared memory",
                hint="Lower arena_bytes, or give /dev/shm more room",
            )

    def part(self, offset: int, nbytes: int) -> Any:
        """Return a ctypes array over a part."""
        return (ctypes.c_char * nbytes).from_address(self.address + offset)


_clients: dict[tuple[Any, ...], Client] = {}
_clients_lock = threading.Lock()


def shared_client(options: MooncakeStoreOptions, deadline: Deadline) -> Client:
    """Return this process's client for these options; opened if it is the first.

    Raises
    ------
    BackendUnavailableError
        The master or the `mooncake_client` does not answer, or an adapter is missing.
    """
    if options.mode == "shared":
        reached: tuple[Any, ...] = (options.client,)
    else:
        reached = (
            options.master,
            options.metadata_server,
            options.host,
            options.protocol,
            options.device_name,
        )
    key = (os.getpid(), options.mode, options.arena_bytes, *reached)
    with _clients_lock:
        if key not in _clients:
            _clients[key] = Client(options, deadline)
        _clients[key].users += 1
        return _clients[key]


def leave(client: Client) -> None:
    """Undo `shared_client`."""
    with _clients_lock:
        client.users -= 1


def _release() -> None:
    with _clients_lock:
        for key, client in list(_clients.items()):
            if key[0] == os.getpid() and client.close():
                del _clients[key]


before_stop(_release)

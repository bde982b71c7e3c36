"""The Mooncake Store as an `ObjectStore`.

Of Mooncake's calls these are atomic between processes, and the protocol needs no more: ``put`` of a key that exists keeps the
old value (and answers 0), so who reads its own value back has claimed the key; ``remove`` answers 0 to one caller.
``upsert`` overwrites in place: meanwhile the key answers -703, and a reader that began before may see both values mixed.

Memory: what this process puts lies hard-pinned in its own segment, written by one memcpy straight from the payload's
buffers (TCP), or from registered memory (RDMA, and mode ``shared``, where it costs a copy into the shared pool). What it
reads arrives in its `Arena`, registered once, and is handed out without a copy.

A read in mode ``shared`` is decided by a ticket where that is in sight: `take` is a request to the `mooncake_client`, 0.25 ms where
`read` takes 1.7 at 16 MB. What was read is removed by a helper thread.

Copies per transfer: client over TCP 1 + the network's; ``shared`` 3 (pool, segment, pool), each at memcpy speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from omni_connector_core.arena import Region
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import BackendUnavailableError, ClosedError, OmniConnectorError, TransferTimeoutError
from omni_connector_core.frame import Frame
from omni_connector_core.memcpy import bytes_address, copy
from omni_connector_core.store import SMALL_NBYTES, NewObject, NoRoomError, ObjectStore
from omni_connector_core.transport import Memory
from omni_connector_mooncake_store import sdk
from omni_connector_mooncake_store.client import Client, leave
from omni_connector_mooncake_store.sdk import CALL_S, TRANSFER_S

__all__ = ["MooncakeObjects"]

ResultT = TypeVar("ResultT")

LATE_S = 1.0
"""A transfer that failed sooner was refused or reset: nothing of it is under way any more."""
PAUSE_S = 200e-6
CLOSE_S = 5.0
_ZEROS = ctypes.create_string_buffer(64)
_ZEROS_ADDRESS = ctypes.addressof(_ZEROS)


class MooncakeObjects(ObjectStore):
    """What one connector does with its process's client.

    Parameters
    ----------
    capacity_bytes
        The largest payload, and the room to reserve for payloads of this connector.
    produces
        Whether it puts payloads.
    """

    longest_name = 1024
    silence_option = "mooncake_master's --client_ttl"

    def __init__(self, client: Client, *, capacity_bytes: int, produces: bool, deadline: Deadline) -> None:
        self._client = client
        self._capacity_bytes = capacity_bytes
        self._reserved = capacity_bytes if produces else 0
        client.reserve(self._reserved, deadline)
        self._closed = False
        self.tickets = client.shared  # over TCP a request more is nothing beside the transfer
        self._discarded: deque[str] = deque()
        self._discarding = threading.Lock()
        self._config = sdk.ReplicateConfig()
        self._config.replica_num = 1
        self._config.with_hard_pin = True
        if client.name is not None:
            self._config.preferred_segment = client.name
        # the longest that a write and a read take: over shared memory no bytes cross a network, nor into the own segment
        local_s = 2 * CALL_S
        self._write_s = local_s if produces or client.name is None else TRANSFER_S
        self._read_s = local_s if client.name is None else TRANSFER_S

    # ---- objects

    def create(self, objects: Sequence[NewObject], *, ttl_s: float, deadline: Deadline) -> None:
        """Create objects: 2 RPCs and one memcpy into the own segment, however many there are."""
        self._check()
        keep: list[object] = [objects]
        names, addresses, sizes = [], [], []
        staged = self._client.staged
        for item in objects:
            places, lengths = self._staged(item, keep, deadline) if staged else _pieces(item.content)
            names.append(item.name)
            addresses.append(places)
            sizes.append(lengths)
        client, config = self._client.sdk, self._config

        def put() -> list[int]:
            codes: list[int] = client.batch_put_from_multi_buffers(names, addresses, sizes, config)
            keep.clear()
            return codes

        def late(codes: list[int]) -> None:
            client.batch_remove(names, True)

        codes = self._client.calls.run(put, longest_s=self._write_s, deadline=deadline, late=late)
        if any(codes):
            created = [name for name, code in zip(names, codes, strict=True) if code == 0]
            if created:
                self.remove(created, deadline=Deadline(CALL_S))
            raise self._error("put", min(codes))

    def _staged(self, item: NewObject, keep: list[object], deadline: Deadline) -> tuple[list[int], list[int]]:
        """Copy an object into the arena; return address and size. What must live on goes into `keep`."""
        content = item.content
        place = self._allocate(item.nbytes, deadline)
        lease = place.lease()
        keep.append(lease)
        if isinstance(content, Frame):
            content.write_into(lease)
        else:
            copy(place.address, content, item.nbytes)
        return [place.address], [item.nbytes]

    def replace(self, name: str, data: bytes, *, ttl_s: float, deadline: Deadline) -> None:
        """Overwrite in place."""
        client, config = self._client.sdk, self._config
        self._write_small(
            "upsert", lambda address: client.upsert_from(name, address, len(data), config), data, deadline
        )

    def claim(self, name: str, data: bytes, *, ttl_s: float, deadline: Deadline) -> bool:
        """Put, and read back who won."""
        client, config = self._client.sdk, self._config
        self._write_small("put", lambda address: client.put_from(name, address, len(data), config), data, deadline)
        while True:
            (found,) = self.load([name], deadline=deadline)
            if found is not None:
                return found == data
            if not self.exist([name], deadline=deadline)[0] or deadline.expired():
                return False  # removed again, or never finished by whoever began
            time.sleep(PAUSE_S)

    def _write_small(self, operation: str, write: Callable[[int], int], data: bytes, deadline: Deadline) -> None:
        if not self._reserved:  # a consumer brings its own room, too: any other may belong to a process that just died
            self._client.mount_small(deadline)
        place = self._allocate(len(data), deadline)
        copy(place.address, data, len(data))
        code = self._client.call_with(place, lambda: write(place.address), self._write_s, deadline)
        if (
            code == sdk.NO_SPACE
        ):  # there is always room for small objects, once a restarted master knows our memory again
            raise BackendUnavailableError(f"{operation}: the store does not know this process's memory yet")
        if code:
            raise self._error(operation, code)

    def take(self, names: Sequence[str], *, deadline: Deadline) -> str | None:
        """Remove by force: leases protect nobody here."""
        client = self._client.sdk
        for name in names:
            code = self._run(lambda name=name: client.remove(name, True), CALL_S, deadline)  # type: ignore[misc]
            if code == 0:
                return name
            if code != sdk.MISSING:
                raise self._error("remove", code)
        return None

    def load(self, names: Sequence[str], *, deadline: Deadline) -> list[bytes | None]:
        """Read into slots of the arena, in one batch."""
        place = self._allocate(len(names) * SMALL_NBYTES, deadline)
        addresses = [place.address + n * SMALL_NBYTES for n in range(len(names))]
        client, names = self._client.sdk, list(names)

        def get() -> list[bytes | int]:
            codes = client.batch_get_into(names, addresses, [SMALL_NBYTES] * len(names))
            places = zip(addresses, codes, strict=True)
            return [ctypes.string_at(address, code) if code > 0 else code for address, code in places]

        found = self._client.call_with(place, get, self._read_s, deadline, overdue=TransferTimeoutError)
        if all(data in (sdk.RPC_FAILED, sdk.RPC_TIMEOUT) for data in found):
            raise self._error("get", min(code for code in found if isinstance(code, int)))
        return [data if isinstance(data, bytes) else None for data in found]

    def read(self, name: str, nbytes: int, *, shared: bool, deadline: Deadline) -> Memory | None:
        """Read into the arena, which the result leases."""
        place = self._allocate(nbytes, deadline)
        client = self._client.sdk
        began_s = time.monotonic()

        def give_back(code: int) -> None:
            """Give the region back, unless the transfer may still be writing to it."""
            proven = code >= 0 or code in (sdk.MISSING, sdk.NOT_READY) or time.monotonic() - began_s < LATE_S
            if proven:
                self._client.release(place)
            else:
                self._client.quarantine(place)

        code = self._client.calls.run(
            lambda: client.get_into(name, place.address, nbytes),
            longest_s=self._read_s,
            deadline=deadline,
            late=give_back,
            overdue=TransferTimeoutError,
        )
        if code == nbytes:
            return place.lease()
        give_back(code)
        if code >= 0 or code in (sdk.MISSING, sdk.NOT_READY):  # another size: it was removed, and the room reused
            return None
        raise self._error("get", code)

    def exist(self, names: Sequence[str], *, deadline: Deadline) -> list[bool]:
        """Ask in one batch."""
        client, names = self._client.sdk, list(names)
        codes = self._run(lambda: client.batch_is_exist(names), CALL_S, deadline)
        if any(code < 0 for code in codes):
            raise self._error("is_exist", min(codes))
        return [code == 1 for code in codes]

    def remove(self, names: Sequence[str], *, deadline: Deadline) -> None:
        """Remove in one batch, by force."""
        client, names = self._client.sdk, list(names)
        codes = self._run(lambda: client.batch_remove(names, True), CALL_S, deadline)
        for code in codes:
            if code not in (0, sdk.MISSING):
                raise self._error("remove", code)

    def discard(self, name: str, *, deadline: Deadline) -> None:
        """Remove in a helper thread: at once, or together with what comes while it is at that.

        What cannot be removed is left to the producer, who looks after what was read, too.
        """
        self._discarded.append(name)
        if not self._discarding.locked():
            self._client.calls.start(self._discard)

    def _discard(self) -> None:
        client = self._client.sdk
        while self._discarded and self._discarding.acquire(blocking=False):
            names = [self._discarded.popleft() for _ in range(len(self._discarded))]
            client.batch_remove(names, True)
            self._discarding.release()

    def purge(self, prefix: str, *, deadline: Deadline) -> None:
        """Remove by regular expression."""
        client, pattern = self._client.sdk, f"^{re.escape(prefix)}"
        self._run(lambda: client.remove_by_regex(pattern, True), CALL_S, deadline)

    # ---- state

    def probe(self, *, deadline: Deadline) -> str:
        """Ask the master."""
        self.exist(["omni-connector-probe"], deadline=deadline)
        quarantined = self._client.quarantined_bytes
        return self._client.detail + (f"; {quarantined:,} bytes in quarantine" if quarantined else "")

    @property
    def capacity_bytes(self) -> int:
        """Size of the own segment."""
        return self._capacity_bytes

    @property
    def held_bytes(self) -> int:
        """What of the process's arena is in use, quarantine included."""
        return self._client.used_bytes

    def close(self) -> None:
        """Give the own segment back."""
        self._closed = True
        with contextlib.suppress(BackendUnavailableError):
            self._client.unreserve(self._reserved, Deadline(CLOSE_S))
        leave(self._client)

    # ---- calls

    def _run(self, call: Callable[[], ResultT], longest_s: float, deadline: Deadline) -> ResultT:
        self._check()
        return self._client.calls.run(call, longest_s=longest_s, deadline=deadline)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the connector is closed")
        self._client.check()

    def _allocate(self, nbytes: int, deadline: Deadline) -> Region:
        self._check()
        return self._client.allocate(nbytes, deadline)

    def _error(self, operation: str, code: int) -> OmniConnectorError | NoRoomError:
        if self._client.shared and code == sdk.BAD_PARAMETER:
            self._client.reconnect()
        return sdk.error(operation, code, shared=self._client.shared)


def _pieces(content: Frame | bytes) -> tuple[list[int], list[int]]:
    """Return addresses and sizes of the pieces that make up an object."""
    if isinstance(content, bytes):
        return [bytes_address(content)], [len(content)]
    addresses, sizes, end = [], [], 0
    for offset, address, nbytes in content.segments():
        if offset > end:
            addresses.append(_ZEROS_ADDRESS)
            sizes.append(offset - end)
        addresses.append(address)
        sizes.append(nbytes)
        end = offset + nbytes
    if content.nbytes > end:
        addresses.append(_ZEROS_ADDRESS)
        sizes.append(content.nbytes - end)
    return addresses, sizes

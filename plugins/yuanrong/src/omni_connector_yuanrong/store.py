"""An `ObjectStore` over a datasystem worker.

Copies: one into the worker's memory, none out; the worker's memory is mapped into every process of its host. Requests:
`create` 2, `read` 1, `take` 1 for an object that was just read, else 2, `replace` 3, all others 1. What was taken is removed in
batches, by a thread.

Objects are never overwritten: a reader at another worker may see the old bytes for 0.2 s. So `replace` removes first. And
the vendor's removal does not say who did it, so `take` is won by creating a marker beside the object, which the vendor
does for exactly one caller, also across workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import (
    BackendUnavailableError,
    ClosedError,
    OmniConnectorError,
    PayloadTooLargeError,
    TransferTimeoutError,
)
from omni_connector_core.frame import Frame
from omni_connector_core.memcpy import buffer_address
from omni_connector_core.store.objects import NewObject, NoRoomError, ObjectStore
from omni_connector_core.transport import Memory
from omni_connector_yuanrong.options import YuanrongOptions
from omni_connector_yuanrong.sdk import (
    AlreadyExistsError,
    ExistenceOpt,
    KVClient,
    NotThereError,
    Session,
    Usage,
    open_session,
    told_usage,
)

__all__ = ["YuanrongStore"]

TAKEN = "#taken"
TAKEN_TTL_S = 60.0
"""How long a marker outlives the taken object, which is removed within milliseconds."""
SWEEP_S = 50e-3
"""For how long removals are collected: each batch is a request that holds the GIL."""
REFUSAL_S = 2.0
"""For how long a refusal of memory stands while nothing was freed: to ask again holds the GIL for `ATTEMPT_S`."""
LOOK_S, PLENTY = 1.0, 0.5
"""How old the knowledge of how full a worker is may be when it was more than half full, seconds."""
LOOKS = 5
"""How often a busy worker is asked how full it is where that decides what the caller is told."""
RESERVE = 0.2
"""A worker of which less than a fifth would be free is asked how full it is before it is asked for memory."""


class _Lease(tuple[memoryview, "deque[int]"]):
    """Keeps a view for a memory that shows its bytes, and notes when so many bytes fewer are held.

    A tuple, as nothing of Python runs when one is made.
    """

    __slots__ = ()

    def __del__(self) -> None:
        view, changes = self
        changes.append(-view.nbytes)


class _Refusal(NamedTuple):
    """A worker's refusal: when, of how many bytes, and with how many in use."""

    at_s: float
    nbytes: int
    allocated: int


class YuanrongStore(ObjectStore):
    """Objects in the workers that one worker is connected with.

    Parameters
    ----------
    options
        Say which worker, and how long it may take.
    deadline
        For connecting.

    Raises
    ------
    BackendUnavailableError
    """

    longest_name: ClassVar[int] = 255 - len(TAKEN)
    tickets = True

    def __init__(self, options: YuanrongOptions, *, deadline: Deadline) -> None:
        self._open: Session | None = open_session(options, deadline)
        self._usage = self._open.usage(attempts=LOOKS)
        self._looked_s = time.monotonic()
        self._put_nbytes = 0
        self._bound = options.capacity_bytes
        self._refusal: _Refusal | None = None
        self._late: dict[str, float] = {}
        self._just_read: deque[str] = deque(maxlen=256)
        self._lock = threading.Lock()
        self._held = 0
        self._changes: deque[int] = deque()
        self._taken: deque[str] = deque()
        self._sweep = threading.Event()
        self._sweeping = False
        self._sweeper = threading.Thread(target=self._sweep_on, name="omni-connector-yuanrong-sweeper", daemon=True)
        self._sweeper.start()

    # ---- writing -----------------------------------------------------------------------------------------------

    def create(self, objects: Sequence[NewObject], *, ttl_s: float, deadline: Deadline) -> None:
        """See `ObjectStore.create`; `mcreate`, fill, `mset_buffer`."""
        session = self._session()
        names = [new.name for new in objects]
        contents = [new.content for new in objects]
        sizes = [len(content) if isinstance(content, bytes) else content.nbytes for content in contents]
        buffers = self._allocate(session, names, sizes, ttl_s, deadline)
        for buffer, content in zip(buffers, contents, strict=True):
            _fill(buffer, content)
        self._publish(session, names, buffers, deadline)

    def replace(self, name: str, data: bytes, *, ttl_s: float, deadline: Deadline) -> None:
        """See `ObjectStore.replace`."""
        self.remove([name], deadline=deadline)
        with _room_for_a_record():
            self.create([NewObject(name, data)], ttl_s=ttl_s, deadline=deadline)

    def claim(self, name: str, data: bytes, *, ttl_s: float, deadline: Deadline) -> bool:
        """See `ObjectStore.claim`; a claim whose answer was lost is told by its data, which no two claimants share."""
        session = self._session()
        how = (
            session.write_mode,
            math.ceil(ttl_s),
            ExistenceOpt.NX,
        )  # whole seconds, as the vendor counts; 0 is for ever
        try:
            with _room_for_a_record():
                session.ask("msettx", lambda client: client.msettx([name], [data], *how), deadline)
        except AlreadyExistsError:
            return self.load([name], deadline=deadline) == [data]
        return True

    def take(self, names: Sequence[str], *, deadline: Deadline) -> str | None:
        """See `ObjectStore.take`."""
        if not (len(names) == 1 and names[0] in self._just_read):
            there = self.exist(names, deadline=deadline)
            names = [name for name, exists in zip(names, there, strict=True) if exists]
        for name in names:
            if self.claim(name + TAKEN, secrets.token_bytes(8), ttl_s=TAKEN_TTL_S, deadline=deadline):
                self._taken.append(name)
                self._sweep.set()
                return name
        return None

    def remove(self, names: Sequence[str], *, deadline: Deadline) -> None:
        """See `ObjectStore.remove`."""
        session = self._session()
        if names:
            session.ask("delete", lambda client: client.delete(list(names)), deadline)

    def discard(self, name: str, *, deadline: Deadline) -> None:
        """See `ObjectStore.discard`: soon, with others."""
        self._taken.append(name)
        if not self._sweeping:
            self._sweep.set()

    # ---- reading -----------------------------------------------------------------------------------------------

    def load(self, names: Sequence[str], *, deadline: Deadline) -> list[bytes | None]:
        """See `ObjectStore.load`."""
        session = self._session()
        if not names:
            return []
        try:
            views = session.ask("get_read_only_buffers", lambda client: _views(client, names), deadline)
        except NotThereError:
            return [None] * len(names)
        except BackendUnavailableError as error:
            if session.answers(deadline):
                raise TransferTimeoutError("the worker that has the objects does not answer this one") from error
            raise
        return [None if view is None else bytes(view) for view in views]

    def read(self, name: str, nbytes: int, *, shared: bool, deadline: Deadline) -> Memory | None:
        """See `ObjectStore.read`: a view of the worker's memory, which others may have views of as well."""
        session = self._session()
        asked_s = time.monotonic()
        if self._late and self._late.get(name, 0.0) > asked_s:
            return None
        try:
            (buffer,) = session.call("get_read_only_buffers", session.reader.get_read_only_buffers, [name], 0)
        except NotThereError:
            return None
        except BackendUnavailableError:
            if not session.answers(deadline):
                raise
            self._leave_alone(name, time.monotonic() - asked_s)
            return None
        if buffer is None:
            return None
        view = buffer.immutable_data()
        if view.nbytes != nbytes:
            raise OmniConnectorError(f"object {name} has {view.nbytes:,} bytes, not {nbytes:,}")
        memory = (ctypes.c_char * nbytes).from_address(buffer_address(view))
        memory.owner = _Lease((view, self._changes))  # type: ignore[attr-defined]
        self._changes.append(nbytes)
        self._just_read.append(name)
        return memoryview(memory).toreadonly() if shared else memory

    def exist(self, names: Sequence[str], *, deadline: Deadline) -> list[bool]:
        """See `ObjectStore.exist`: there, and not taken."""
        session = self._session()
        if not names:
            return []
        found = self._exist(session, [*names, *(name + TAKEN for name in names)], deadline)
        there, taken = found[: len(names)], found[len(names) :]
        return [exists and not gone for exists, gone in zip(there, taken, strict=True)]

    # ---- state -------------------------------------------------------------------------------------------------

    def probe(self, *, deadline: Deadline) -> str:
        """See `ObjectStore.probe`."""
        session = self._session()
        session.require_listener()
        session.ask("health_check", _check_health, deadline)
        self._usage = session.usage() or self._usage
        host, port = session.address
        used = f", {self._usage.allocated:,} of {self._usage.capacity:,} bytes in use" if self._usage else ""
        return f"health_check of the worker at {host}:{port}{used}"

    @property
    def capacity_bytes(self) -> int | None:
        """See `ObjectStore.capacity_bytes`: what the worker holds, which others share, or the option if that is less."""
        if self._usage is None:
            return self._bound
        return self._usage.capacity if self._bound is None else min(self._bound, self._usage.capacity)

    @property
    def held_bytes(self) -> int:
        """See `ObjectStore.held_bytes`: views that are out."""
        with self._lock:
            while self._changes:
                self._held += self._changes.popleft()
            return self._held

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self._open, session = None, self._open
        self._sweep.set()
        self._sweeper.join()
        if session is not None and self._taken:
            self._remove_taken(session)

    # ---- helpers -----------------------------------------------------------------------------------------------

    def _leave_alone(self, name: str, took_s: float) -> None:
        """Do not ask for an object for as long as an attempt took that did not get it from another host's worker.

        That worker goes on sending what nobody waits for any more; asked at once again, it would send nothing else for ever.
        """
        now = time.monotonic()
        self._late = {late: until_s for late, until_s in self._late.items() if until_s > now}
        self._late[name] = now + took_s

    def _session(self) -> Session:
        session = self._open
        if session is None:
            raise ClosedError("the store is closed")
        return session

    @staticmethod
    def _exist(session: Session, names: list[str], deadline: Deadline) -> list[bool]:
        return session.ask("exist", lambda client: list(client.exist(names)), deadline)

    def _allocate(
        self, session: Session, names: list[str], sizes: list[int], ttl_s: float, deadline: Deadline
    ) -> list[Any]:
        """Ask for memory, of a worker that probably has it: asking a full one holds the GIL for `ATTEMPT_S`."""
        nbytes = sum(sizes)
        self._require_room(session, nbytes)
        began_s = time.monotonic()
        while True:
            try:
                buffers: list[Any] = session.call(
                    "mcreate", session.client.mcreate, names, sizes, session.write_mode, math.ceil(ttl_s)
                )
                self._put_nbytes += nbytes
                return buffers
            except (
                NoRoomError,
                BackendUnavailableError,
            ) as error:  # a full worker's refusal may come too late to be heard
                usage = self._note(told_usage(error) or session.usage(attempts=LOOKS), nbytes)
                if isinstance(error, NoRoomError) or (usage and usage.allocated + nbytes > usage.capacity):
                    self._refusal = _Refusal(time.monotonic(), nbytes, usage.allocated if usage else 0)
                    raise NoRoomError(f"the worker is full: {usage or error}") from error
                session.require_listener()
                if deadline.expired() or time.monotonic() - began_s > session.request_s:
                    raise

    def _require_room(self, session: Session, nbytes: int) -> None:
        """See that there is room, with a question of `LOOK_S` where that is in doubt."""
        refusal, seen, now = self._refusal, self._usage, time.monotonic()
        refused = refusal is not None and nbytes >= refusal.nbytes and now - refusal.at_s < REFUSAL_S
        doubtful = seen is not None and (
            seen.allocated + self._put_nbytes + nbytes > (1 - RESERVE) * seen.capacity
            or (seen.allocated > PLENTY * seen.capacity and now - self._looked_s > LOOK_S)
        )
        if not (refused or doubtful):
            return
        usage = self._note(session.usage(), nbytes)
        full = usage is not None and usage.allocated + nbytes > usage.capacity
        if full or (refusal is not None and refused and (usage is None or usage.allocated >= refusal.allocated)):
            raise NoRoomError(f"the worker is full: {usage or refusal}")

    def _note(self, usage: Usage | None, nbytes: int) -> Usage | None:
        """Remember how full the worker is, and refuse what it can never hold."""
        if usage is not None:
            self._usage, self._looked_s, self._put_nbytes = usage, time.monotonic(), 0
        if self._usage is not None and nbytes > self._usage.capacity:
            raise PayloadTooLargeError(
                f"{nbytes:,} bytes for a worker that holds {self._usage.capacity:,}",
                hint="Start the worker with a larger --shared_memory_size_mb, or put the payload in parts",
            )
        return usage

    def _publish(self, session: Session, names: list[str], buffers: list[Any], deadline: Deadline) -> None:
        """Publish, once: asked again after an answer was lost, the vendor knows nothing of the buffers."""
        began_s = time.monotonic()
        while True:
            try:
                session.call("mset_buffer", session.client.mset_buffer, buffers)
                return
            except (BackendUnavailableError, NotThereError) as error:
                session.require_listener()
                if all(self._exist(session, names, deadline)):
                    return
                if deadline.expired() or time.monotonic() - began_s > session.request_s:
                    self._taken.extend(names)  # it may yet be done
                    self._sweep.set()
                    raise BackendUnavailableError(f"the worker did not publish: {error}") from error

    def _sweep_on(self) -> None:
        while True:
            self._sweep.wait()
            self._sweep.clear()
            session = self._open
            if session is None:
                return
            self._sweeping = True
            time.sleep(SWEEP_S)
            self._sweeping = False  # before it looks: what is discarded from now on wakes it again
            self._remove_taken(session)

    def _remove_taken(self, session: Session) -> None:
        names = [self._taken.popleft() for _ in range(len(self._taken))]
        if names:
            try:
                session.ask("delete", lambda client: client.delete(names), Deadline(session.request_s))
            except OmniConnectorError:
                return  # their time-to-live ends them


@contextlib.contextmanager
def _room_for_a_record() -> Iterator[None]:
    """Say that the service cannot be used now when it has no room for a small object: only payloads wait for room."""
    try:
        yield
    except NoRoomError as error:
        raise BackendUnavailableError(f"no room for a record: {error}") from error


def _fill(buffer: Any, content: Frame | bytes) -> None:
    """Copy content into an unpublished object; no view of it survives, since a stale one would write to another object."""
    view = buffer.MutableData()
    if isinstance(content, Frame):
        content.write_into(view)
    else:
        view[:] = content
    view.release()


def _views(client: KVClient, names: Sequence[str]) -> list[memoryview | None]:
    """Look at objects where they lie; None for one that is not there."""
    buffers = client.get_read_only_buffers(list(names), 0)
    return [None if buffer is None else buffer.immutable_data() for buffer in buffers]


def _check_health(client: KVClient) -> None:
    status = client.health_check()
    if not status.is_ok():
        raise BackendUnavailableError(f"the worker is not healthy: {status.to_string()}")

"""What a backend implements: a `Transport` moves frames, never payloads.

A backend subclasses `Transport` and fills in the underscored methods. The public ones are final: they check state, role
and capability, and complete the errors that pass through, so that no backend has to.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

from omni_connector_core.capabilities import Capabilities, Health, Usage
from omni_connector_core.context import Role, TransportContext
from omni_connector_core.deadline import LONGEST_S, Deadline
from omni_connector_core.errors import (
    BufferMismatchError,
    ClosedError,
    ConfigError,
    ForkedError,
    OmniConnectorError,
    RoleError,
    TransferTimeoutError,
    UnsupportedError,
    locate,
)
from omni_connector_core.frame import Frame, scatter
from omni_connector_core.key import Key
from omni_connector_core.metadata import ANYWHERE, Metadata, Where, make_metadata

__all__ = ["Memory", "Transport"]

Memory = Any
"""One received frame: a contiguous buffer-protocol object that owns the lease on it.

The lease ends when the object is garbage collected, so views keep it alive by keeping the object. Make it a *writable
ctypes array* (``(c_char * n).from_buffer(...)`` or ``from_address``) with a ``weakref.finalize`` on it, or a read-only
memoryview where the consumer must not write. The finalizer runs in any thread, at any point: append to a deque there,
take no lock.
"""

FIRST_PAUSE_S = 50e-6
LONGEST_PAUSE_S = 5e-3


_OTHER_END = {Role.PRODUCER: Role.CONSUMER, Role.CONSUMER: Role.PRODUCER}

_forks = 0
"""How many forks lie between this process and the first of its line that imported this module."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


REASON_NBYTES = 2000
"""A backend carries a reason of so many bytes in one message, or one small object."""


class Transport(ABC):
    """Moves frames from the producer to the consumers of one edge.

    Thread-safe: every method may be called from any thread, several at a time. Construction is cheap, opens no
    connection and binds no port.

    To implement: `_put`, `_poll`, `_exists`, `_fail`, `_cleanup`, `_usage`, `_probe`, `_close`. Override `_get` when the backend
    can wait better than by polling, `_get_into` when bytes can go straight into the caller's buffers,
    `_consumed` where the base class' answer is too slow, and `news` where nothing new can be seen without a poll.

    Parameters
    ----------
    context
        Kept as `self.context`; `self.options` are the backend's options.
    """

    capabilities: Capabilities
    """What it can do: an attribute of the class, unless options decide."""

    def __init__(self, context: TransportContext) -> None:
        self.context = context
        self.options = context.options
        self._forks = _forks
        self._not_ours = _OTHER_END.get(context.role)
        self._closed = False
        self._close_lock = threading.Lock()

    # ---- for backends ------------------------------------------------------------------------------------------

    @abstractmethod
    def _put(
        self, key: Key, frame: Frame, *, readers: int, ttl_s: float, overwrite: bool, deadline: Deadline
    ) -> dict[str, Any]:
        """Make the frame readable by `readers` consumers; copy it before returning, or raise.

        Returns
        -------
        dict
            The ``at`` part of the metadata: whatever lets this backend's consumer go straight to the payload, JSON-safe.

        Raises
        ------
        PayloadConflictError, RequestAbandonedError, CapacityError, PayloadTooLargeError, BackendUnavailableError
        """

    @abstractmethod
    def _poll(self, key: Key, where: Where) -> Memory | None:
        """Take the frame if it is here now; None if it is not yet. Never waits on another process for long (1 ms).

        Each success is one read of the payload's `readers`.

        Raises
        ------
        ProducerFailedError, RequestAbandonedError, PayloadExpiredError, PeerLostError, AmbiguousKeyError
        """

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        """Take the frame, waiting for it to the deadline. The base class polls with a growing pause.

        Raises
        ------
        TransferTimeoutError, and what `_poll` raises
        """
        pause_s = FIRST_PAUSE_S
        while (memory := self._poll(key, where)) is None:
            remaining_s = deadline.remaining_s()
            if not remaining_s:
                raise TransferTimeoutError(f"not there after {deadline.timeout_s:g} s")
            time.sleep(min(pause_s, remaining_s))
            if self._closed:
                raise ClosedError("closed while waiting")
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
        return memory

    def _get_into(self, key: Key, where: Where, buffers: Sequence[Any], *, deadline: Deadline) -> int:
        """Move the payload's raw buffers into the caller's; the base class goes through `_get`.

        Returns
        -------
        int
            Bytes written.

        Raises
        ------
        BufferMismatchError
            The totals differ; nothing was written.
        """
        return scatter(self._get(key, where, deadline=deadline), buffers)

    def _expect(self, keys: Sequence[Key], where: Where) -> None:  # noqa: B027 - a backend that polls gains nothing
        """Announce that these keys will be asked for soon, so that the producer can answer as soon as it puts them."""

    def _forget(self, key: Key, where: Where) -> None:  # noqa: B027 - nothing to do for a backend without interest
        """Drop the interest in a key that `_expect` or an unanswered `_poll` or `_get` may have left with a producer."""

    def news(self) -> int | None:
        """Return a number that changes when a poll may find what the one before did not, and now and then besides.

        None: only a poll can tell. Costs less than a poll; asks nobody.
        """
        return None

    def _register(self, buffer: Any) -> None:  # noqa: B027 - most backends need no registration
        """Prepare the caller's memory for `_get_into`."""

    @abstractmethod
    def _exists(self, keys: Sequence[Key], where: Where) -> list[bool]:
        """Say for each key whether a payload is there and unread; may say no of one that was only just put."""

    def _consumed(self, key: Key, *, deadline: Deadline) -> bool:
        """At the producer: wait until the payload is gone (with every reader, failed, expired); False at the deadline."""
        pause_s = FIRST_PAUSE_S
        where = Where(producer=self.context.producer)
        while self._exists([key], where)[0]:
            remaining_s = deadline.remaining_s()
            if not remaining_s:
                return False
            time.sleep(min(pause_s, remaining_s))
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
        return True

    @abstractmethod
    def _fail(self, key: Key, reason: str, *, deadline: Deadline) -> None:
        """Tell every consumer of the key, waiting now or later, that it will never come; drops a payload put before."""

    @abstractmethod
    def _cleanup(self, request_id: str, *, deadline: Deadline) -> int:
        """Discard every payload of the request and refuse later puts of it, from either end of the edge.

        A producer discards its own, so that the request may be retried on another replica; a consumer, or an end that is
        both, discards every producer's, also of producers that it meets later.

        Returns
        -------
        int
            How many unread payloads were discarded.
        """

    @abstractmethod
    def _usage(self) -> Usage:
        """Say what this process holds; cheap, asks no other process."""

    @abstractmethod
    def _probe(self, *, deadline: Deadline) -> str:
        """Find out whether the backend works now, by using it.

        Returns
        -------
        str
            What was probed, for an operator to read.

        Raises
        ------
        OmniConnectorError
            It does not; the error says why.
        """

    @abstractmethod
    def _close(self) -> None:
        """Free everything; frames already handed out stay valid. Called once."""

    # ---- for everyone else ---------------------------------------------------------------------------------------

    @final
    def put(
        self,
        key: Key,
        frame: Frame,
        *,
        deadline: Deadline,
        readers: int = 1,
        ttl_s: float | None = None,
        overwrite: bool = False,
    ) -> Metadata:
        """Put a frame; see `OmniConnector.put` for the semantics."""
        self._check(key, Role.PRODUCER)
        if type(readers) is not int or readers < 1:
            raise self._located(ConfigError(f"readers is an int of at least 1, not {readers!r}"), key)
        if readers > 1 and not self.capabilities.fan_out:
            raise self._unsupported(key, "fan_out", f"readers={readers}")
        if overwrite and not self.capabilities.overwrite:
            raise self._unsupported(key, "overwrite", "overwrite=True")
        context = self.context
        if ttl_s is None:
            ttl_s = self.options.ttl_s
        if not isinstance(ttl_s, (int, float)) or not ttl_s >= 0:  # NaN is not
            raise self._located(ConfigError(f"ttl is a number of seconds, at least 0, not {ttl_s!r}"), key)
        if ttl_s > LONGEST_S:
            ttl_s = LONGEST_S
        try:
            at = self._put(key, frame, readers=readers, ttl_s=ttl_s, overwrite=overwrite, deadline=deadline)
        except OmniConnectorError as error:
            raise self._located(error, key)  # noqa: B904 - the same error, completed
        return make_metadata(context.backend, context.edge, context.producer, key, frame.nbytes, at)

    @final
    def get(self, key: Key, where: Where = ANYWHERE, *, deadline: Deadline) -> Memory:
        """Take a frame, waiting to the deadline; see `Memory` for its lifetime."""
        self._check(key, Role.CONSUMER)
        try:
            return self._get(key, where, deadline=deadline)
        except OmniConnectorError as error:
            raise self._located(error, key)  # noqa: B904

    @final
    def poll(self, key: Key, where: Where = ANYWHERE) -> Memory | None:
        """Take a frame if it is here now, else None."""
        self._check(key, Role.CONSUMER)
        try:
            return self._poll(key, where)
        except OmniConnectorError as error:
            raise self._located(error, key)  # noqa: B904

    @final
    def get_into(self, key: Key, buffers: Sequence[Any], where: Where = ANYWHERE, *, deadline: Deadline) -> int:
        """Move a payload's raw buffers, in order, into the caller's; returns bytes written."""
        self._check(key, Role.CONSUMER)
        for buffer in buffers:
            view = memoryview(buffer)
            if view.readonly or not view.c_contiguous:
                raise self._located(BufferMismatchError("get_into needs writable, C-contiguous buffers"), key)
        try:
            return self._get_into(key, where, buffers, deadline=deadline)
        except OmniConnectorError as error:
            raise self._located(error, key)  # noqa: B904

    @final
    def expect(self, keys: Sequence[Key], where: Where = ANYWHERE) -> None:
        """Announce keys that will be asked for soon; what is then not asked for must be forgotten (`forget`)."""
        self._check(None, Role.CONSUMER)
        try:
            self._expect(keys, where)
        except OmniConnectorError as error:
            raise self._located(error, None)  # noqa: B904

    @final
    def forget(self, key: Key, where: Where = ANYWHERE) -> None:
        """Drop the interest that a poll left behind; harmless when there is none."""
        self._check(key, Role.CONSUMER)
        self._forget(key, where)

    @final
    def register(self, buffer: Any) -> None:
        """Prepare a buffer that `get_into` will be given (in whole or in slices)."""
        self._check(None, Role.CONSUMER)
        self._register(buffer)

    @final
    def exists(self, keys: Sequence[Key], where: Where = ANYWHERE) -> list[bool]:
        """Say for each key whether an unread payload is there."""
        self._check(None, None)
        try:
            return self._exists(keys, where)
        except OmniConnectorError as error:
            raise self._located(error, None)  # noqa: B904

    @final
    def consumed(self, key: Key, *, deadline: Deadline) -> bool:
        """At the producer: wait until a payload is gone; False if it is still there at the deadline.

        Who reads it needs this process no more then.
        """
        self._check(key, Role.PRODUCER)
        try:
            return self._consumed(key, deadline=deadline)
        except OmniConnectorError as error:
            raise self._located(error, key)  # noqa: B904

    @final
    def fail(self, key: Key, reason: str, *, deadline: Deadline) -> None:
        """Tell the key's consumers that it will never come, and why: at most `REASON_NBYTES` of the reason reach them."""
        self._check(key, Role.PRODUCER)
        if not isinstance(reason, str):
            raise self._located(ConfigError(f"the reason of a failure is a str, not {type(reason).__name__}"), key)
        encoded = reason.encode("utf-8", "backslashreplace")  # a file name may hold what is no Unicode
        if len(encoded) > REASON_NBYTES:
            encoded = encoded[:REASON_NBYTES] + b" ..."
        try:
            self._fail(key, encoded.decode("utf-8", "ignore"), deadline=deadline)
        except OmniConnectorError as error:
            raise self._located(error, key)  # noqa: B904

    @final
    def cleanup(self, request_id: str, *, deadline: Deadline) -> int:
        """Discard every payload of a request, from either end."""
        key = Key(request_id)
        self._check(key, None)
        try:
            return self._cleanup(request_id, deadline=deadline)
        except OmniConnectorError as error:
            raise self._located(error, key)  # noqa: B904

    @final
    def health(self, *, deadline: Deadline) -> Health:
        """Probe the backend, within the deadline. A closed transport is not ok, and says so."""
        if self._closed:
            return Health(ok=False, detail="closed", usage=Usage())
        try:
            self._check(None, None)
            return Health(ok=True, detail=self._probe(deadline=deadline), usage=self._usage())
        except OmniConnectorError as error:
            return Health(ok=False, detail=str(self._located(error, None)), usage=self._usage())

    @final
    def usage(self) -> Usage:
        """Say what this process holds; nothing once it is closed."""
        return Usage() if self._closed else self._usage()

    @final
    def close(self) -> None:
        """Free everything; idempotent. Frames handed out before stay valid."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        if self._forks == _forks:  # the parent's sockets and memory are not a forked child's to end
            self._close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    # ---- checks --------------------------------------------------------------------------------------------------

    def _check(self, key: Key | None, needed: Role | None) -> None:
        if self._closed:
            raise self._located(ClosedError("the connector is closed"), key)
        if self._forks != _forks:
            raise self._located(ForkedError("the connector belongs to the parent process"), key)
        if needed is self._not_ours and needed is not None:
            role = self.context.role
            raise self._located(
                RoleError(
                    f"this process is the {role.value} of the edge",
                    hint=f"Only the {needed.value} end can do this; the runtime gives the role when it opens the connector",
                ),
                key,
            )

    def _unsupported(self, key: Key, capability: str, asked: str) -> OmniConnectorError:
        return self._located(
            UnsupportedError(
                f"{asked} needs the capability {capability!r}",
                hint="`omni-connector backends` shows which backends claim it",
            ),
            key,
        )

    def _located(self, error: OmniConnectorError, key: Key | None) -> OmniConnectorError:
        locate(error, key=key, edge=self.context.edge, backend=self.context.backend)
        return error

"""The vendor's client: one session a process for each worker, and its errors as ours.

Five traps that shape this module:

- Every call holds the GIL until it returns, so none may wait: reads ask with a timeout of 0; a request is given up early and
  made again; a worker that did not answer is asked for some milliseconds first, and a dead one noticed by a plain socket; a
  worker that may be full is asked how full it is, since the vendor's client itself goes on asking a full one for memory.
- The client that asked for an object's memory must be the one that publishes it: by another the memory is lost.
- A view keeps its object's memory only while the client lives that made it: clients are kept for the life of the process.
- Its I/O threads spin for locks that its other threads hold, and give themselves a higher priority where they may (root): on a
  busy host the holder then waits for the spinner. They are put back to the priority of the process.
- Settings are read from the environment when the library is loaded.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import BackendUnavailableError, OmniConnectorError
from omni_connector_core.store.objects import NoRoomError
from omni_connector_core.store.patience import patiently
from omni_connector_yuanrong.options import YuanrongOptions

# read by the library when it is loaded
os.environ.setdefault(
    "DATASYSTEM_CLIENT_LOG_DIR", f"{tempfile.gettempdir()}/omni-connector-{os.getuid()}/yuanrong-client"
)
os.environ.setdefault("DATASYSTEM_MIN_LOG_LEVEL", "2")
os.environ.setdefault("DATASYSTEM_LOG_MONITOR_ENABLE", "false")

from yr.datasystem.kv_client import ExistenceOpt, KVClient, WriteMode

__all__ = [
    "AlreadyExistsError",
    "ExistenceOpt",
    "KVClient",
    "NotThereError",
    "Session",
    "Usage",
    "kind_of",
    "open_session",
    "told_usage",
]

ResultT = TypeVar("ResultT")

ATTEMPT_S = 0.5
"""Longest time, with the GIL, of one attempt at a request that moves no payload."""
LOOK_S = 0.02
"""Longest time, with the GIL, of asking whether a worker answers again, and how full it is."""

_CODE = re.compile(r"code: \[([^\]]*)\]")
_USAGE = re.compile(r"Total allocated (\d+), .*threshold size: (\d+)")
_ENDLESS_NBYTES = 1 << 62
_LOST = "disconnect"
"""As in "Client and Worker disconnect" (the worker's answer) and "Client ... disconnected from worker" (the library's own)."""
_FULL_BEFORE = " Out of memory *"
"""As in "RPC Retry detail: [ RPC unavailable * 1 Out of memory * 3 ]": the library had asked again by itself."""


class NotThereError(Exception):
    """None of the keys that were asked for exists."""


class AlreadyExistsError(Exception):
    """One of the keys that were to be created exists."""


class Usage(NamedTuple):
    """How full a worker is: bytes in use, and the most it holds."""

    allocated: int
    capacity: int


_ERRORS: dict[str, type[Exception]] = {
    "Key not found": NotThereError,
    "Object already exist error": AlreadyExistsError,
    "Out of memory": NoRoomError,
    "No space available": NoRoomError,
    "Worker pull object not found error": NotThereError,  # removed meanwhile, or its worker was restarted
    "Invalid parameter": OmniConnectorError,
    "Runtime error": OmniConnectorError,
    "Not authorized": OmniConnectorError,
}
"""Codes of the vendor that mean something of their own; any other one: the service does not serve now."""


def kind_of(error: RuntimeError) -> type[Exception]:
    """Say which of our errors a vendor's ``RuntimeError("code: [Name], msg: ...")`` is; the only place that reads them.

    The kind and no error: one in a local variable would keep its frames, and the views in them, until the collector comes.
    """
    text = str(error)
    found = _CODE.match(text)
    kind = _ERRORS.get(found[1], BackendUnavailableError) if found else OmniConnectorError
    return NoRoomError if kind is BackendUnavailableError and _FULL_BEFORE in text else kind


class Session:
    """The clients of one worker. Thread-safe.

    Costs, once a process: 30 threads, 20 file descriptors, 54 MB, 0.1 s to start.

    Attributes
    ----------
    client
        For everything but reading payloads; its requests end after `ATTEMPT_S`.
    reader
        For reading payloads, which may have to come from another host first; its requests end after `request_s`.
    write_mode
        With which objects are created.
    """

    def __init__(self, options: YuanrongOptions, deadline: Deadline) -> None:
        self.address = (options.host, options.port)
        self.write_mode = WriteMode[options.write_mode.upper()]
        self.request_s = options.request_timeout_s
        self._connect_s = options.connect_timeout_s
        self._suspect = False
        self.require_listener(deadline)
        self.client = self._open(options, min(options.request_timeout_s, ATTEMPT_S))
        self.reader = self._open(options, options.request_timeout_s)
        self._looker = self._open(options, LOOK_S)

    def _open(self, options: YuanrongOptions, request_s: float) -> KVClient:
        client = KVClient(
            options.host,
            options.port,
            connect_timeout_ms=round(options.connect_timeout_s * 1000),
            req_timeout_ms=max(round(request_s * 1000), 1),
            tenant_id=options.tenant_id,
        )
        self.call("connect", client.init)
        _level_priorities()
        return client

    def call(self, name: str, request: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Make one call: after one that got no answer, see that the worker answers before the GIL is given away for long.

        Raises
        ------
        BackendUnavailableError
        """
        if self._suspect:
            self.require_listener()
            self._look(name)
        try:
            result = request(*arguments)
        except RuntimeError as error:
            kind = kind_of(error)
            self._suspect = kind is BackendUnavailableError
            raise kind(f"{name}: {error}") from error
        self._suspect = False
        return result

    def _look(self, call: str) -> None:
        """See that the worker answers. That it has lost the client that asks (a busy one heard nothing of it) is an answer."""
        try:
            self._looker.exist(["omni-connector-look"])
        except RuntimeError as error:
            kind = kind_of(error)
            if kind is BackendUnavailableError and _LOST in str(error):
                return
            raise kind(f"{call}: {error}") from error

    def answers(self, deadline: Deadline) -> bool:
        """Whether the worker answers, or answers again within `ATTEMPT_S` or by the deadline."""
        last = Deadline(min(ATTEMPT_S, deadline.remaining_s()))

        def look() -> None:
            self.require_listener(last)
            self._look("exist")

        try:
            patiently(look, last)
        except BackendUnavailableError:
            return False
        return True

    def ask(self, call: str, request: Callable[[KVClient], ResultT], deadline: Deadline) -> ResultT:
        """Make a request that may be made twice, again and again for `request_s` as long as the worker does not answer.

        Raises
        ------
        BackendUnavailableError
        """
        last = Deadline(min(self.request_s, deadline.remaining_s()))
        while True:
            try:
                return self.call(call, request, self.client)
            except BackendUnavailableError:
                self.require_listener()
                if last.expired():
                    raise
            time.sleep(LOOK_S)

    def require_listener(self, deadline: Deadline | None = None) -> None:
        """Find out, without the GIL, whether the worker's port is open; within `connect_timeout_s`, or the caller's deadline.

        Raises
        ------
        BackendUnavailableError
        """
        within_s = self._connect_s if deadline is None else min(self._connect_s, max(deadline.remaining_s(), 0.01))
        try:
            socket.create_connection(self.address, within_s).close()
        except OSError as error:
            raise BackendUnavailableError(
                "no datasystem worker listens on {}:{}".format(*self.address),
                hint="Start one (`omni-connector services up yuanrong`), or set `host` and `port` to this host's worker",
            ) from error

    def usage(self, *, attempts: int = 1) -> Usage | None:
        """Ask how full the worker is; None when it does not answer within `LOOK_S`, each time that it is asked.

        There is no call for it: an object that no worker can hold is asked for, and the refusal says the numbers.
        """
        return next(filter(None, (self._ask_usage() for _ in range(attempts))), None)

    def _ask_usage(self) -> Usage | None:
        try:
            self._looker.mcreate(["omni-connector-usage"], [_ENDLESS_NBYTES])
        except RuntimeError as error:
            kind = kind_of(error)
            if kind is NoRoomError:
                return told_usage(error)
            if kind is BackendUnavailableError:
                return None
            raise kind(f"usage: {error}") from error
        raise OmniConnectorError("a worker of 4 EiB")


def told_usage(refusal: Exception) -> Usage | None:
    """Read from a refusal how full the worker is, if it says."""
    found = _USAGE.search(str(refusal))
    return Usage(int(found[1]), int(found[2])) if found else None


def _level_priorities() -> None:
    """Give every thread the priority of the process."""
    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            if os.getpriority(os.PRIO_PROCESS, thread) < own:
                os.setpriority(os.PRIO_PROCESS, thread, own)


_sessions: dict[tuple[object, ...], Session] = {}
_opening = threading.Lock()


def open_session(options: YuanrongOptions, deadline: Deadline) -> Session:
    """Return this process' session with that worker, made on first use and kept: an idle one uses no processor time.

    Raises
    ------
    BackendUnavailableError
    """
    key = (
        os.getpid(),
        options.host,
        options.port,
        options.tenant_id,
        options.write_mode,
        options.connect_timeout_s,
        options.request_timeout_s,
    )
    with _opening:
        session = _sessions.get(key)
        if session is None:
            session = _sessions[key] = Session(options, deadline)
        return session

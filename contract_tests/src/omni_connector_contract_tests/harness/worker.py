"""A peer process: keeps open connectors and does to them what it is told over a pipe, many things at a time.

Nothing here knows pytest: the same `Servant` also runs in threads of the test process, for backends that cannot
cross processes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.harness.payloads import build
from omni_connector_core import OmniConnector, create_connector

__all__ = ["Acting", "Call", "Close", "Open", "Run", "Servant"]

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Open:
    """Open a connector under a number."""

    number: int
    backend: Backend
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of an open connector; recipes among the arguments are built first."""

    number: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """Run a function of a module: with an open connector's `Acting` first if `number` is given."""

    number: int | None
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Close:
    """Close a connector and forget everything that was kept with it."""

    number: int


@dataclass(slots=True)
class Acting:
    """What a function that acts in a peer has at hand: a connector, and a place to keep things between acts."""

    connector: OmniConnector
    kept: dict[str, Any] = field(default_factory=dict)


class Servant:
    """Does what requests say."""

    def __init__(self) -> None:
        self._acting: dict[int, Acting] = {}

    def do(self, request: Open | Call | Run | Close) -> Any:
        """Carry out one request."""
        match request:
            case Open(number, backend, arguments):
                backend.describe()
                self._acting[number] = Acting(create_connector(backend.name, **arguments))
                return None
            case Call(number, method, args, kwargs):
                bound = getattr(self._acting[number].connector, method)
                return bound(*[build(argument) for argument in args], **kwargs)
            case Run(None, function, args, kwargs):
                return function(*args, **kwargs)
            case Run(number, function, args, kwargs):
                assert number is not None
                return function(self._acting[number], *args, **kwargs)
            case Close(number):
                acting = self._acting.pop(number, None)
                if acting is not None:
                    acting.connector.close()
                    acting.kept.clear()
                return None


def _answer(servant: Servant, pipe: Connection, lock: threading.Lock, number: int, request: Any) -> None:
    try:
        good, answer = True, pickle.dumps(servant.do(request))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test wants to see it
        try:
            good, answer = False, pickle.dumps(error)
        except Exception:  # noqa: BLE001 - an error that cannot travel is told in words
            good, answer = False, pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    reply = pickle.dumps((number, good, answer))
    with lock:
        pipe.send_bytes(reply)


def main(fd: int) -> None:
    """Serve the pipe until its other end closes."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    pipe = Connection(fd)
    servant, lock = Servant(), threading.Lock()
    while True:
        try:
            number, request = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        threading.Thread(target=_answer, args=(servant, pipe, lock, number, request), daemon=True).start()


if __name__ == "__main__":
    from omni_connector_contract_tests.harness import worker

    worker.main(int(sys.argv[1]))  # not __main__'s own: requests name the classes of the imported module

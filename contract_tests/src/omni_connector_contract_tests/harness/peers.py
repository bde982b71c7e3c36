"""The test's side of a peer: a process, or for backends that cannot cross processes a set of threads here."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil

from omni_connector_contract_tests.harness.worker import Servant

__all__ = ["HungError", "LocalPeer", "Peer", "PeerGoneError", "Peers", "Pending", "ProcessPeer"]


class HungError(AssertionError):
    """A peer did not answer in time."""


class PeerGoneError(Exception):
    """A peer ended before it answered: the test killed it, or it crashed."""


class Pending:
    """A request that a peer is at."""

    def __init__(self, what: str, patience_s: float) -> None:
        self._what, self._patience_s = what, patience_s
        self.future: Future[Any] = Future()

    def done(self) -> bool:
        """Whether the answer is here."""
        return self.future.done()

    def result(self, within_s: float | None = None) -> Any:
        """Return the answer, or raise the peer's exception.

        Raises
        ------
        HungError
            No answer in time.
        """
        within_s = self._patience_s if within_s is None else within_s
        try:
            return self.future.result(within_s)
        except FutureTimeoutError:
            if self.future.done():
                raise
            raise HungError(f"{self._what}: no answer within {within_s:g} s") from None


class Peer(ABC):
    """Somebody who keeps connectors open and does what requests say."""

    pid: int

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s

    @abstractmethod
    def start(self, request: Any) -> Pending:
        """Send a request."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it can still answer."""

    @abstractmethod
    def shutdown(self) -> None:
        """End it."""

    def ask(self, request: Any) -> Any:
        """Send a request and wait for the answer."""
        return self.start(request).result()


class LocalPeer(Peer):
    """Threads of this process."""

    def __init__(self, patience_s: float) -> None:
        super().__init__(patience_s)
        self.pid = os.getpid()
        self._servant = Servant()

    @property
    def alive(self) -> bool:
        """Always."""
        return True

    def start(self, request: Any) -> Pending:
        """Send a request to a thread of its own."""
        pending = Pending(repr(request)[:200], self.patience_s)

        def answer() -> None:
            try:
                pending.future.set_result(self._servant.do(request))
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test wants to see it
                pending.future.set_exception(error)

        threading.Thread(target=answer, daemon=True, name="contract-peer").start()
        return pending

    def shutdown(self) -> None:
        """Nothing to end."""


class ProcessPeer(Peer):
    """A process, started afresh (nothing is inherited), that dies with this one.

    Parameters
    ----------
    environment
        Variables on top of this process's.
    prefix
        A command that runs it, e.g. in another network namespace; it must execute it in its own place.
    """

    def __init__(self, patience_s: float, environment: dict[str, str], prefix: Sequence[str] = ()) -> None:
        super().__init__(patience_s)
        ours, theirs = Pipe()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "omni_connector_contract_tests.harness.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
            )
        self.pid = self._process.pid
        self._pipe = ours
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, Pending] = {}
        self._hung_up = False
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"contract-peer-{self.pid}")
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether the process runs; of one that was killed the end of its pipe is seen first."""
        return not self._hung_up and self._process.poll() is None

    def start(self, request: Any) -> Pending:
        """Send a request."""
        pending = Pending(repr(request)[:200], self.patience_s)
        number = next(self._numbers)
        self._pending[number] = pending
        try:
            with self._lock:
                self._pipe.send_bytes(pickle.dumps((number, request)))
        except OSError as error:
            if self._pending.pop(number, None) is not None:
                pending.future.set_exception(PeerGoneError(str(error)))
        return pending

    def _read(self) -> None:
        while True:
            try:
                number, good, answer = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                self._hung_up = True
                break
            pending = self._pending.pop(number)
            try:
                answer = pickle.loads(answer)
            except Exception as error:  # noqa: BLE001 - what was sent cannot be read: the test must know
                good, answer = False, error
            if good:
                pending.future.set_result(answer)
            else:
                pending.future.set_exception(answer)
        while self._pending:
            _, pending = self._pending.popitem()
            pending.future.set_exception(PeerGoneError(f"the peer process {self.pid} ended"))

    def kill(self) -> None:
        """SIGKILL it, and what a prefix put in between, and wait until it is gone."""
        process = psutil.Process(self.pid)
        for each in [*reversed(process.children(recursive=True)), process]:
            each.kill()
        self._process.wait()
        self._reader.join()

    def pause(self) -> None:
        """SIGSTOP it and wait until it stands."""
        process = psutil.Process(self.pid)
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED:
            os.sched_yield()

    def resume(self) -> None:
        """SIGCONT it."""
        os.kill(self.pid, signal.SIGCONT)

    def shutdown(self) -> None:
        """End it, if it was not, and close the pipe."""
        if self._process.poll() is None:
            self.kill()
        self._process.wait()
        self._reader.join()
        self._pipe.close()


class Peers:
    """The peers of a session: started when first needed, replaced when killed, used by many tests.

    Parameters
    ----------
    processes
        Whether each peer is a process.
    patience_s
        How long to wait for any answer before the peer counts as hung, seconds.
    prefixes
        By peer: what to put before its command, to start it somewhere else (`two_hosts`).
    apart
        Names of peers that have a runtime folder of their own; the others share one.
    folders
        Where else, beside the runtime folder, they leave files.
    """

    def __init__(
        self,
        *,
        processes: bool,
        patience_s: float,
        prefixes: Mapping[str, Sequence[str]] | None = None,
        apart: Sequence[str] = ("elsewhere",),
        folders: Sequence[Path] = (),
    ) -> None:
        self.processes, self.patience_s, self.apart = processes, patience_s, apart
        self._prefixes = prefixes or {}
        self.folder = Path(tempfile.mkdtemp(prefix="oc-", dir="/tmp"))  # short: unix sockets may lie in it
        self.folders = [self.folder, *folders]
        self.token = f"contract-{os.getpid()}-{self.folder.name[3:]}"
        self._peers: dict[str, Peer] = {}
        self._namespaces = itertools.count()
        self.past_pids: set[int] = set()

    def namespace(self) -> str:
        """Return a namespace that nobody used before."""
        return f"{self.token}-{next(self._namespaces)}"

    def get(self, name: str) -> Peer:
        """Return the peer of that name."""
        peer = self._peers.get(name)
        if peer is None or not peer.alive:
            if self.processes:
                if peer is not None:
                    peer.shutdown()
                folder = self.folder / name if name in self.apart else self.folder
                folder.mkdir(exist_ok=True)
                environment = {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder)}
                peer = ProcessPeer(self.patience_s, environment, self._prefixes.get(name, ()))
            else:
                peer = LocalPeer(self.patience_s)
            self._peers[name] = peer
            self.past_pids.add(peer.pid)
        return peer

    def alive(self) -> dict[str, Peer]:
        """Return the peers that were started and still run."""
        return {name: peer for name, peer in self._peers.items() if peer.alive}

    def shutdown(self) -> None:
        """End them all."""
        for peer in self._peers.values():
            peer.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

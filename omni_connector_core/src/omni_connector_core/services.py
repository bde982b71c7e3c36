"""Run the daemons that a backend needs: a master, a worker, a metadata server.

A backend that needs a daemon names a function in its plugin, as in
``service="omni_connector_mooncake_store.service:start"``. Called, it returns a running :class:`Service`::

    with start() as service:
        connector = create_connector("mooncake_store", service.config())

One :class:`Service` is a few processes started in order and stopped in reverse. Each process is described
by a frozen :class:`DaemonSpec`, runs in a session of its own, writes one log file, and dies with the
process that started it, also when that one is killed: no daemon outlives its owner. The service's folder is
short enough for unix sockets and is removed by :meth:`Service.stop`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Daemon", "DaemonSpec", "Service", "ServiceError", "before_stop", "free_ports", "start_with"]

# Below the kernel's ephemeral range (32768 and up): no outgoing connection of anybody is given one of these.
_PORTS = range(20000, 32768)

# Runs in the child before the daemon: PR_SET_PDEATHSIG (1) survives exec; the check closes the race with a
# parent that died before it was set. A launcher, since preexec_fn is unsafe in a process with threads.
_LAUNCH = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this daemon is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""

# The death signal comes when the *thread* that forked ends, so one that ends with the process forks them all.
_spawner = ThreadPoolExecutor(1, thread_name_prefix="omni-connector-services")


_releases: list[Callable[[], None]] = []


def before_stop(release: Callable[[], None]) -> None:
    """Have `release` called before a service of this process stops.

    For a backend that stays connected when its last connector has closed: what nobody uses lets go while there is somebody to
    say goodbye to. A vendor's client that is left behind waits for seconds, and complains.
    """
    _releases.append(release)


class ServiceError(RuntimeError):
    """A daemon did not start, or did not become ready in time; the message ends with its last log lines."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Choose TCP ports that nobody listens on.

    Parameters
    ----------
    count
        How many; all different.
    host
        The address that will be bound.

    Returns
    -------
    list of int
        Ports from 20000 to 32767, at random, so that two sessions on one host seldom choose the same.

    Raises
    ------
    ServiceError
        None could be bound on `host`.
    """
    ports: list[int] = []
    cause: OSError | None = None
    with contextlib.ExitStack() as held:
        for port in random.sample(_PORTS, min(len(_PORTS), 100 + count)):
            if len(ports) == count:
                break
            probe = held.enter_context(socket.socket(_family(host), socket.SOCK_STREAM))
            try:
                probe.bind((host, port))
            except OSError as error:
                cause = error
            else:
                ports.append(port)
    if len(ports) < count:
        raise ServiceError(f"found {len(ports)} of {count} free ports on {host}: {cause}") from cause
    return ports


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@dataclass(frozen=True, kw_only=True)
class DaemonSpec:
    """How to start one daemon and how to tell that it is ready.

    Parameters
    ----------
    name
        Short name, unique in its service; also the name of the log file.
    argv
        Path of the executable (looked up in PATH when it has no slash) and its arguments.
    ready
        Called again and again until it returns true; must not block for long. An ``OSError`` means "not yet".
    env
        Added to this process's environment.
    ready_s
        Seconds from start until `ready` must have returned true.
    stop_s
        Seconds between SIGTERM and SIGKILL.
    """

    name: str
    argv: Sequence[str]
    ready: Callable[[], object]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_s: float = 30.0
    stop_s: float = 10.0


class Daemon:
    """One running daemon. Made by :meth:`Service.launch`."""

    def __init__(self, spec: DaemonSpec, directory: Path) -> None:
        self.spec = spec
        self.log = directory / f"{spec.name}.log"
        executable = shutil.which(spec.argv[0])
        if executable is None:
            raise ServiceError(f"{spec.name}: {spec.argv[0]!r} is not an executable; is the backend's SDK installed?")
        with self.log.open("ab") as log:
            self._process = _spawner.submit(
                subprocess.Popen,
                [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), executable, *spec.argv[1:]],
                env={**os.environ, **spec.env},
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ).result()

    @property
    def pid(self) -> int:
        """Process id, that of the daemon itself (also its process group)."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process exists; a stopped (SIGSTOP) one does."""
        return self._process.poll() is None

    def tail(self, lines: int = 20) -> str:
        """Return the last `lines` lines of the log."""
        with self.log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 64 * 1024))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    def wait_ready(self) -> None:
        """Wait until the daemon is ready.

        Raises
        ------
        ServiceError
            It exited, or was not ready after ``spec.ready_s``.
        """
        deadline = time.monotonic() + self.spec.ready_s
        pause, cause = 0.01, None
        while True:
            if not self.running:
                raise self._error(f"exited with code {self._process.returncode} before it was ready", cause)
            try:
                if self.spec.ready():
                    return
            except OSError as error:
                cause = error
            if time.monotonic() > deadline:
                raise self._error(f"was not ready after {self.spec.ready_s:g} s", cause)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.2)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to its whole process group after ``spec.stop_s``. Idempotent."""
        if self.running:
            self._process.terminate()
            self.resume()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self.spec.stop_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to its whole process group, and wait. For fault tests. Idempotent."""
        if self._process.returncode is None or self._group_exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def suspend(self) -> None:
        """SIGSTOP: a daemon that hangs. For fault tests."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT, the end of :meth:`suspend`."""
        self._process.send_signal(signal.SIGCONT)

    def _group_exists(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except OSError:
            return False
        return True

    def _error(self, what: str, cause: BaseException | None) -> ServiceError:
        log = self.tail() or "(empty)"
        error = ServiceError(f"{self.spec.name} (pid {self.pid}) {what}; the end of its log:\n{log}")
        error.__cause__ = cause
        return error


class Service:
    """Some daemons that belong together, and the connector options that reach them. A context manager.

    Parameters
    ----------
    name
        The backend's name.

    Attributes
    ----------
    directory : pathlib.Path
        Private to this service, mode 0700, short; holds the logs; removed by :meth:`stop`.
    daemons : dict of str to Daemon
        Those launched, by name, in order.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.directory = Path(tempfile.mkdtemp(prefix="oc-", dir=os.environ.get("XDG_RUNTIME_DIR") or None))
        self.daemons: dict[str, Daemon] = {}
        self._config: dict[str, Any] = {}

    def launch(self, spec: DaemonSpec) -> Daemon:
        """Start a daemon and wait until it is ready; when it does not become so, stop all of the service.

        Raises
        ------
        ServiceError
            It did not become ready; the message ends with its log.
        """
        try:
            daemon = self.daemons[spec.name] = Daemon(spec, self.directory)
            daemon.wait_ready()
        except BaseException:
            self.stop()
            raise
        return daemon

    def restart(self, name: str) -> Daemon:
        """Kill the daemon of that name and start it again with the same arguments (ports included)."""
        self.daemons[name].kill()
        return self.launch(self.daemons[name].spec)

    def offer(self, **options: Any) -> Self:
        """Set the connector options that reach this service; returns itself."""
        self._config.update(options)
        return self

    def config(self) -> dict[str, Any]:
        """Return the options that reach this service, to paste under ``connectors:`` or pass as `config`."""
        return dict(self._config)

    def describe(self) -> dict[str, Any]:
        """Return what runs: name, folder, options, and pid, state and log of each daemon. Survives JSON."""
        return {
            "service": self.name,
            "directory": str(self.directory),
            "config": self.config(),
            "daemons": {
                name: {"pid": daemon.pid, "running": daemon.running, "log": str(daemon.log)}
                for name, daemon in self.daemons.items()
            },
        }

    def stop(self) -> None:
        """Let go what is connected and unused, stop every daemon, the last started first, and remove the folder. Idempotent."""
        if any(daemon.running for daemon in self.daemons.values()):
            for release in _releases:
                release()
        for daemon in reversed(self.daemons.values()):
            daemon.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_with(start: Callable[..., Service], settings: Sequence[str]) -> Service:
    """Start a service with settings from a command line.

    Parameters
    ----------
    start
        What the plugin names.
    settings
        Each ``name=value``: an argument of `start`, its value in JSON or a plain word.

    Raises
    ------
    ServiceError
        There is no such setting.
    """
    known = list(inspect.signature(start).parameters)
    arguments: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name not in known:
            raise ServiceError(f"{setting!r} is no setting of this service; it has {', '.join(f'{k}=' for k in known)}")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return start(**arguments)

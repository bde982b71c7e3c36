"""Datasystem workers, with the metastore that joins them, for one host: tests, demos, small deployments."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path

from omni_connector_core.options import byte_size
from omni_connector_core.services import DaemonSpec, Service, ServiceError, free_ports

__all__ = ["YuanrongService", "start"]

HOST = "127.0.0.1"
STOP_S = 0.2
"""A worker takes 4 s to end in good order, and has nothing to save."""

NICE = -10
"""Where it is allowed, a worker's threads go before those of its clients, and none before another of its own: its I/O threads
(-15 by default, for root) spin for locks that the others hold, and would wait for whom they keep from running."""


def _processors() -> list[int]:
    """Return the processors of the workers: all but one, which their clients are sure to get.

    A client sends a request in several pieces, and a worker's I/O thread that has the first one spins until it has the last. As many
    such threads as processors keep from running whom they wait for: eight clients on two processors stood still for a minute.
    """
    own = sorted(os.sched_getaffinity(0))
    return own[:-1] or own


# No write of metadata to disk, no page faults at first touch, one arena, one master: a worker is up in 0.9 s instead of 5.5
# and writes 13 MB instead of 300. Times are those after which a dead client's or worker's objects are given up.
TUNED = {
    "rocksdb_write_mode": "none",
    "arena_per_tenant": 1,
    "shared_memory_populate": "true",
    "enable_fallocate": "false",
    "enable_distributed_master": "false",
    "node_timeout_s": 10,
    "node_dead_timeout_s": 60,
    "client_dead_timeout_s": 60,
    "enable_reconciliation": "false",
    "log_monitor": "false",
    "minloglevel": 1,
    "io_thread_nice": NICE,
}


class YuanrongService(Service):
    """Workers ``worker0`` (with the metastore), ``worker1``, ...

    Attributes
    ----------
    addresses : list of (str, int)
        Host and port of each worker.
    metastore : str
        ``HOST:PORT`` of the metastore, which workers of other hosts join.
    """

    def __init__(self, metastore: str) -> None:
        super().__init__("yuanrong")
        self.addresses: list[tuple[str, int]] = []
        self.metastore = metastore


def start(
    *, workers: int = 1, memory: int | str = "512MiB", host: str = HOST, metastore: str | None = None
) -> YuanrongService:
    """Start workers on free ports of this host; they are ready when this returns.

    Parameters
    ----------
    workers
        How many; the first runs the metastore and is stopped last.
    memory
        Shared memory of each, taken at once.
    host
        Address of this host on which they listen; others reach it there.
    metastore
        ``HOST:PORT`` of another host's metastore, which they join in place of running one.

    Raises
    ------
    ServiceError
        The SDK is missing, or a worker did not become ready.
    """
    package = _package()
    own, *ports = free_ports(1 + workers, host)
    service = YuanrongService(metastore or f"{host}:{own}")
    for number, port in enumerate(ports):
        directory = service.directory / str(number)
        directory.mkdir()
        flags = {
            "worker_address": f"{host}:{port}",
            "metastore_address": service.metastore,
            "start_metastore_service": "false" if number or metastore else "true",
            "shared_memory_size_mb": max(byte_size(memory) >> 20, 1),
            "unix_domain_socket_dir": directory / "u",
            "rocksdb_store_dir": directory / "r",
            "log_dir": directory / "l",
            "health_check_path": directory / "healthy",
            "ready_check_path": directory / "ready",
            "monitor_config_file": directory / "config",
            **TUNED,
        }
        service.launch(
            DaemonSpec(
                name=f"worker{number}",
                argv=[
                    *("taskset", "--cpu-list", ",".join(map(str, _processors())), "nice", "-n", str(NICE)),
                    str(package / "datasystem_worker"),
                    *(f"--{flag}={value}" for flag, value in flags.items()),
                ],
                ready=_Ready(directory / "ready", (host, port)),
                env={"LD_LIBRARY_PATH": str(package / "lib")},
                stop_s=STOP_S,
            )
        )
        service.addresses.append((host, port))
    service.offer(host=host, port=ports[0])
    return service


class _Ready:
    """Whether a worker serves: it wrote its file, anew when it was started again, and it listens."""

    def __init__(self, path: Path, address: tuple[str, int]) -> None:
        self._path = path
        self._address = address
        self._written_ns = 0

    def __call__(self) -> bool:
        written_ns = self._path.stat().st_mtime_ns
        if written_ns == self._written_ns:
            return False
        socket.create_connection(self._address, 1.0).close()
        self._written_ns = written_ns
        return True


def _package() -> Path:
    spec = importlib.util.find_spec("yr.datasystem")
    if spec is None or not spec.submodule_search_locations:
        raise ServiceError("openYuanrong datasystem is not installed: pip install openyuanrong-datasystem==0.8.1")
    package = Path(spec.submodule_search_locations[0])
    if not os.access(package / "datasystem_worker", os.X_OK):
        raise ServiceError(f"{package / 'datasystem_worker'} is not executable")
    return package

"""Runs a Mooncake master, and the client for mode ``shared``, on free ports of this host."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from omni_connector_core.options import byte_size
from omni_connector_core.services import DaemonSpec, Service, ServiceError, free_ports

__all__ = ["start"]

_ENVIRONMENT = {"GLOG_minloglevel": "1", "MC_LOG_LEVEL": "WARNING", "MC_FORCE_TCP": "1"}


def start(
    *,
    mode: str = "client",
    host: str = "127.0.0.1",
    lease_s: float = 10.0,
    client_ttl_s: int = 30,
    shared_bytes: int | str = "1GiB",
    ports: Sequence[int] | None = None,
) -> Service:
    """Start the daemons and wait until they serve.

    Parameters
    ----------
    mode
        ``client``: the master alone. ``shared``: also the `mooncake_client` whose memory this host's processes share.
    host
        Address to bind.
    lease_s
        For how long a read protects its object, seconds; a slower transfer fails.
    client_ttl_s
        Seconds after which a client that does not ping is dead, and its objects gone: so long a process may be stopped or starved,
        or the network cut, without losing payloads.
    shared_bytes
        Memory of the `mooncake_client`.
    ports
        Of the master, its HTTP server, and the `mooncake_client`; None: free ones.

    Raises
    ------
    ServiceError
    """
    rpc_port, metrics_port, *rest = ports or free_ports(3, host)
    service = Service("mooncake_store").offer(mode=mode, master=f"{host}:{rpc_port}")

    def serves() -> bool:
        with urllib.request.urlopen(f"http://{host}:{metrics_port}/health", timeout=1) as answer:
            return b'"service_ready":true' in answer.read()

    service.launch(
        DaemonSpec(
            name="master",
            argv=[
                _executable("mooncake_master"),
                f"--rpc_address={host}",
                f"--rpc_port={rpc_port}",
                f"--metrics_host={host}",
                f"--metrics_port={metrics_port}",
                f"--default_kv_lease_ttl={int(lease_s * 1000)}",
                f"--client_ttl={client_ttl_s}",
            ],
            env=_ENVIRONMENT,
            ready=serves,
        )
    )
    if mode == "shared":
        service.launch(
            DaemonSpec(
                name="client",
                argv=[
                    _executable("mooncake_client"),
                    f"--host={host}",
                    "--metadata_server=P2PHANDSHAKE",
                    f"--master_server_address={host}:{rpc_port}",
                    f"--global_segment_size={byte_size(shared_bytes)}",
                    f"--port={rest[0]}",
                    "--protocol=tcp",
                ],
                env=_ENVIRONMENT,
                ready=lambda: _listens(host, rest[0]),
            )
        )
        service.offer(client=f"{host}:{rest[0]}")
    return service


def _listens(host: str, port: int) -> bool:
    with socket.create_connection((host, port), timeout=1):
        return True


def _executable(name: str) -> str:
    spec = find_spec("mooncake")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        return str(Path(folder) / name)
    raise ServiceError("Mooncake is not installed: pip install 'omni-connector-mooncake-store[cpu]'")

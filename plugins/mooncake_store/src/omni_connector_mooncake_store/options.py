"""Options of the Mooncake Store backend."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from omni_connector_core.options import Options, byte_size, one_of, option

__all__ = ["MooncakeStoreOptions", "address", "host_towards"]


def address(value: object) -> tuple[str, int]:
    """Split ``host:port``.

    Raises
    ------
    ValueError
        It is not of that form.
    """
    host, colon, port = str(value).rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError("expected host:port")
    return host.strip("[]"), int(port)


def _checked_address(value: object) -> str:
    host, port = address(value)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_towards(service: str) -> str:
    """Return this host's address on the route to a service (no packet is sent)."""
    host, port = address(service)
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        found: str = probe.getsockname()[0]
        return found


@dataclass(frozen=True, kw_only=True)
class MooncakeStoreOptions(Options):
    """Options of the Mooncake Store backend."""

    master: str = option(
        parse=_checked_address,
        default="127.0.0.1:50051",
        doc="`host:port` of `mooncake_master`. In mode `shared`: not used, the client knows it.",
    )
    mode: str = option(
        parse=one_of("client", "shared"),
        default="client",
        doc="`client`: this process is a client of its own and keeps what it puts in its own memory. `shared`: it uses the "
        "`mooncake_client` of its host over shared memory, seven times faster than TCP between processes of one host.",
    )
    client: str = option(
        parse=_checked_address,
        default="127.0.0.1:50052",
        doc="`host:port` of this host's `mooncake_client`, for mode `shared`.",
    )
    metadata_server: str = option(
        default="P2PHANDSHAKE",
        doc="Where clients learn of each other: `P2PHANDSHAKE` (no server needed), or `http://...`, `etcd://...`, `redis://...`.",
    )
    host: str = option(
        default="auto",
        doc="Address of this host that other clients reach. `auto`: its address on the route to the master, so loopback when the "
        "master is on this host. `health()` says which.",
    )
    protocol: str = option(
        parse=one_of("tcp", "rdma"),
        default="tcp",
        doc="`rdma` in production, `tcp` everywhere. RDMA without an adapter is an error at start.",
    )
    device_name: str = option(
        default="", doc="RDMA adapters to use, comma-separated (`mlx5_0,mlx5_1`); empty: all that Mooncake finds."
    )
    capacity_bytes: int = option(
        parse=byte_size,
        default="1GiB",
        doc="The most bytes of unread payloads that a producer has in the store. In mode `client` that much of its process's memory "
        "is mounted for them, touched only as far as it is used.",
    )
    arena_bytes: int = option(
        parse=byte_size,
        default="1GiB",
        doc="Memory into which a process receives, and out of which it sends where the network needs registered memory; shared "
        "by its connectors with equal options. Touched, and so occupied, only as far as it is used.",
    )

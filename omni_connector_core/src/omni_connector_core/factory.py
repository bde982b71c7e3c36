"""Opens connectors: the one place where a backend's name, its options and the runtime's knowledge come together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from omni_connector_core.codec import Codec
from omni_connector_core.connector import OmniConnector
from omni_connector_core.context import Peer, Role, TransportContext
from omni_connector_core.errors import ConfigError
from omni_connector_core.key import Edge, Producer
from omni_connector_core.options import parse_options
from omni_connector_core.plugins import PluginManager, plugin_manager

__all__ = ["create_connector", "default_namespace"]


def create_connector(
    name: str,
    config: Mapping[str, Any] | None = None,
    *,
    edge: Edge | tuple[str, str] = Edge("0", "1"),
    role: Role | str = Role.BOTH,
    namespace: str | None = None,
    replica: int = 0,
    rank: int = 0,
    peers: Mapping[Peer | tuple[str, int, int], str] | None = None,
    plugins: PluginManager = plugin_manager,
) -> OmniConnector:
    """Open one end of one edge over a backend.

    Parameters
    ----------
    name
        The backend: the name of an installed plugin.
    config
        The backend's own options; not changed.
    edge, role
        Which edge, and which end of it this process is.
    namespace
        Keeps deployments apart; None: the environment's OMNI_CONNECTOR_NAMESPACE, else one per user. Two processes on one
        host that name the same namespace and edge find each other.
    replica, rank
        Which of the producing stage's processes this is.
    peers
        Control addresses of processes on other hosts, by stage, replica and rank.

    Raises
    ------
    UnknownBackendError, PluginError, OptionError
    ConfigError
        An edge, role, replica or rank that is none.
    """
    stages = tuple(map(str, edge)) if isinstance(edge, tuple | list) else ()
    if len(stages) != 2:
        raise ConfigError(f"an edge is the names of its two stages, not {edge!r}")
    try:
        role = Role(role)
    except ValueError as error:
        raise ConfigError(f"a role is one of {', '.join(one.value for one in Role)}, not {role!r}") from error
    for field, number in (("replica", replica), ("rank", rank)):
        if type(number) is not int or number < 0:
            raise ConfigError(f"{field} is an int of at least 0, not {number!r}")
    spec = plugins.spec(name)
    options = parse_options(spec.load_options(), config, backend=name)
    context = TransportContext(
        backend=name,
        options=options,
        namespace=default_namespace() if namespace is None else namespace,
        edge=Edge(*stages),
        role=role,
        producer=Producer(replica, rank),
        peers={Peer(*peer): address for peer, address in (peers or {}).items()},
    )
    codec = Codec(checksum=options.checksum)
    plugins.extend_codec(codec)
    return OmniConnector(plugins.wrap(spec.load_transport()(context), context), codec)


def default_namespace() -> str:
    """Return the namespace of processes that name none: the environment's, else one per user."""
    return os.environ.get("OMNI_CONNECTOR_NAMESPACE") or f"user-{os.getuid()}"

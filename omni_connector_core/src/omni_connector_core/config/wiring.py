"""Which end of which edge a process is: the one place that derives it, for every runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omni_connector_core.config.deploy import ConnectorConfig, DeployConfig
from omni_connector_core.connector import OmniConnector
from omni_connector_core.context import Peer, Role
from omni_connector_core.errors import OmniConnectorError
from omni_connector_core.factory import create_connector
from omni_connector_core.key import Edge
from omni_connector_core.plugins import PluginManager, plugin_manager

__all__ = ["End", "ends_of", "open_ends"]


@dataclass(frozen=True, slots=True)
class End:
    """One stage's end of one edge."""

    edge: Edge
    role: Role
    connector: ConnectorConfig


def ends_of(config: DeployConfig, stage_id: str | int) -> list[End]:
    """List the ends that a stage has, incoming edges first.

    Raises
    ------
    ConfigError
        There is no such stage.
    """
    stage = config.stage(stage_id).stage_id
    incoming = [End(e.edge, Role.CONSUMER, e.connector) for e in config.edges if e.edge.consumer == stage]
    return incoming + [End(e.edge, Role.PRODUCER, e.connector) for e in config.edges if e.edge.producer == stage]


def open_ends(
    config: DeployConfig,
    stage_id: str | int,
    *,
    namespace: str | None = None,
    replica: int = 0,
    rank: int = 0,
    peers: Mapping[Peer | tuple[str, int, int], str] | None = None,
    plugins: PluginManager = plugin_manager,
) -> dict[Edge, OmniConnector]:
    """Open every end that a stage's process has; parameters as for `create_connector`.

    Raises
    ------
    ConfigError, UnknownBackendError, PluginError, OptionError
        Nothing stays open.
    """
    opened: dict[Edge, OmniConnector] = {}
    try:
        for end in ends_of(config, stage_id):
            options = {
                name: value
                for name, value in end.connector.options.items()
                if name not in end.connector.pipeline_options
            }
            opened[end.edge] = create_connector(
                end.connector.name,
                options,
                edge=end.edge,
                role=end.role,
                namespace=namespace,
                replica=replica,
                rank=rank,
                peers=peers,
                plugins=plugins,
            )
    except OmniConnectorError:
        for connector in opened.values():
            connector.close()
        raise
    return opened

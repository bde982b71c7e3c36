"""Checks a deploy config against the installed backends, before anything is started."""

from __future__ import annotations

import typing
from collections.abc import Collection, Mapping

from omni_connector_core.config.deploy import ConnectorConfig, DeployConfig
from omni_connector_core.errors import ConfigError, OmniConnectorError
from omni_connector_core.options import parse_options
from omni_connector_core.plugins import PluginManager, plugin_manager

__all__ = ["check_backends"]


def check_backends(
    config: DeployConfig,
    *,
    plugins: PluginManager = plugin_manager,
    aliases: Mapping[str, str] = {},
    foreign_options: Collection[str] = (),
) -> list[ConfigError]:
    """Find unknown backends, missing SDKs, and options that are unknown or have a bad value.

    Parameters
    ----------
    aliases
        Other names under which backends may be named in this file.
    foreign_options
        Options that are read by someone else than the backend.

    Returns
    -------
    list
        One error per fault, with file and line.
    """
    faults: list[ConfigError] = []
    seen: list[ConnectorConfig] = []
    for edge in config.edges:
        connector = edge.connector
        if connector not in seen:
            seen.append(connector)
            faults.extend(_faults(connector, plugins, aliases.get(connector.name, connector.name), foreign_options))
    return faults


def _faults(
    connector: ConnectorConfig, plugins: PluginManager, backend: str, foreign: Collection[str]
) -> typing.Iterator[ConfigError]:
    try:
        spec = plugins.spec(backend)
        options = spec.load_options()
    except OmniConnectorError as error:
        yield ConfigError(f"{connector.position}: {error.message}", hint=error.hint)
        return
    if not spec.sdk_present():
        yield ConfigError(
            f"{connector.position}: the SDK {spec.sdk!r} of {backend} is not installed",
            hint=f"Install it: {spec.install}",
        )
    for name, value in connector.options.items():
        if name in foreign or name in connector.pipeline_options:
            continue
        try:
            parse_options(options, {name: value}, backend=backend)
        except OmniConnectorError as error:
            position = connector.options_position.get(name, connector.position)
            yield ConfigError(f"{position}: {error.message}", hint=error.hint)

# SPDX-License-Identifier: Apache-2.0
"""Says no to a deploy file that cannot work, before any model is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

from omni_connector_core import ConfigError, config, plugin_manager
from omni_connector_serve.vllm_omni.backends import drop_in_names, our_names
from omni_connector_serve.vllm_omni.deployment import read_deployment
from omni_connector_serve.vllm_omni.extra import OWN_OPTIONS, upstream_options

__all__ = ["check_deploy_file", "faults_of"]


def faults_of(path: Path, *, built_in: Collection[str] = ()) -> list[ConfigError]:
    """Find everything that is wrong with a deploy file's connectors.

    vLLM-Omni serves much of it in silence, over its own SharedMemoryConnector: a misspelt reference, two sides of an edge that
    disagree, an edge without connector, an option that nobody reads.

    Parameters
    ----------
    built_in
        Names of connectors that vLLM-Omni brings itself, whose options are not checked.
    """
    if faults := config.faults(path):
        return faults
    deploy = config.load(path)
    stand_ins, upstream = drop_in_names(), upstream_options()
    ours = tuple(
        edge for edge in deploy.edges if edge.connector.name in stand_ins or edge.connector.name not in built_in
    )
    return config.check_backends(
        dataclasses.replace(deploy, edges=ours),
        aliases=stand_ins,
        foreign_options=upstream.engine | upstream.pipeline | upstream.unread | OWN_OPTIONS,
    )


def check_deploy_file(path: Path) -> None:
    """Refuse a deploy file that names a backend of ours and is wrong; another is vLLM-Omni's own business.

    Raises
    ------
    ConfigError
        Lists every fault, with file and line.
    """
    from vllm_omni.distributed.omni_connectors import OmniConnectorFactory

    built_in = OmniConnectorFactory.list_registered_connectors()
    backends = frozenset(plugin_manager.names())
    if names_of_connectors(path) & backends and (faults := faults_of(path, built_in=set(built_in) - backends)):
        raise ConfigError("the deploy file is wrong:\n  " + "\n  ".join(map(str, faults)))
    read_deployment(path).check(our_names())


def names_of_connectors(path: Path) -> frozenset[str]:
    """The connectors that a deploy file names, by reference or in place."""
    from vllm_omni.config.stage_config import resolve_deploy_yaml

    deploy = resolve_deploy_yaml(path)
    given = [*(deploy.get("connectors") or {}).values(), deploy.get("connector")]
    for stage in deploy.get("stages") or ():
        for side in ("input_connectors", "output_connectors"):
            given += (stage.get(side) or {}).values()
    return frozenset(str(entry.get("name") or entry.get("type")) for entry in given if isinstance(entry, dict))

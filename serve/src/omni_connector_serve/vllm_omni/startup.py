# SPDX-License-Identifier: Apache-2.0
"""Says no to a deploy file that cannot work, before any model is loaded."""

from __future__ import annotations

from pathlib import Path

from vllm_omni.config.stage_config import resolve_deploy_yaml

from omni_connector_core import ConfigError, config, plugin_manager
from omni_connector_serve.vllm_omni.check import faults_of, mixed_stages

__all__ = ["check_deploy_file"]


def check_deploy_file(path: Path) -> None:
    """Refuse a deploy file that names a backend of ours and is wrong; another is vLLM-Omni's own business.

    Raises
    ------
    ConfigError
        Lists every fault, with file and line.
    """
    if names_of_connectors(path) & frozenset(plugin_manager.names()):
        faults = faults_of(path)
    else:  # built-in names alone: what upstream goes on with is right, as long as drop-in has not divided a stage
        faults = [] if config.faults(path) else mixed_stages(config.load(path))
    if faults:
        raise ConfigError("the deploy file is wrong:\n  " + "\n  ".join(map(str, faults)))


def names_of_connectors(path: Path) -> frozenset[str]:
    """The connectors that a deploy file names, by reference or in place."""
    deploy = resolve_deploy_yaml(path)
    given = [*(deploy.get("connectors") or {}).values(), deploy.get("connector")]
    for stage in deploy.get("stages") or ():
        for side in ("input_connectors", "output_connectors"):
            given += (stage.get(side) or {}).values()
    return frozenset(str(entry.get("name") or entry.get("type")) for entry in given if isinstance(entry, dict))

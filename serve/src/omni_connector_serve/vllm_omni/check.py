# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the connectors of a vLLM-Omni deploy file. Needs neither vllm nor vllm-omni."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from omni_connector_core import ConfigError, config, plugin_manager
from omni_connector_serve.vllm_omni.backends import drop_in_names, our_names
from omni_connector_serve.vllm_omni.extra import OWN_OPTIONS, upstream_options

__all__ = ["faults_of", "mixed_stages"]


def faults_of(path: Path) -> list[ConfigError]:
    """Find everything that is wrong with a deploy file's connectors.

    vLLM-Omni serves much of it in silence, over its own SharedMemoryConnector: a misspelt reference, two sides of an edge that
    disagree, an edge without connector, an option that nobody reads.
    """
    if faults := config.faults(path):
        return faults
    deploy = config.load(path)
    stand_ins, upstream = drop_in_names(), upstream_options()
    ours = [e for e in deploy.edges if e.connector.name in stand_ins or e.connector.name not in upstream.built_in]
    drop_ins = [plugin_manager.spec(backend).drop_in for backend in set(stand_ins.values())]
    translated = {option for drop_in in drop_ins if drop_in is not None for option in drop_in.options}
    return mixed_stages(deploy) + config.check_backends(
        dataclasses.replace(deploy, edges=tuple(ours)),
        aliases=stand_ins,
        foreign_options=upstream.engine | upstream.pipeline | upstream.unread | OWN_OPTIONS | translated,
    )


def mixed_stages(deploy: config.DeployConfig) -> list[ConfigError]:
    """Find stages that take from a connector of one make and send over one of the other.

    The engine gives a stage one connector for both directions, so such a stage would wait for ever.
    """
    known = our_names()
    return [
        ConfigError(
            f"{sends.position}: stage {sends.edge.producer} takes from {takes.edge} over {takes.connector.name} and sends to "
            f"{sends.edge} over {sends.connector.name}, and only one of them is omni-connector's: vLLM-Omni gives a stage "
            "one connector for both directions",
            hint="Name omni-connector backends on both edges; they may differ from each other",
        )
        for takes in deploy.edges
        for sends in deploy.edges
        if takes.edge.consumer == sends.edge.producer
        and (takes.connector.name in known) != (sends.connector.name in known)
    ]

# SPDX-License-Identifier: Apache-2.0
"""What this process knows of the deployment that it is part of.

vLLM-Omni tells an out-of-tree connector neither its edge nor what stands at the other end. The deploy file does: the main
process finds it on its command line and passes it on to every process that it starts, in the environment, together with
one namespace for all of them; vLLM carries it to Ray's. A program that uses the Python API sets the two variables itself.
"""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omni_connector_core import Edge

NAMESPACE_ENV = "OMNI_CONNECTOR_NAMESPACE"
DEPLOY_ENV = "OMNI_CONNECTOR_DEPLOY_CONFIG"
"""Path of the deploy file."""


@dataclass(frozen=True)
class EdgeSettings:
    """What the deploy file says of an edge.

    Attributes
    ----------
    name, extra
        The connector.
    readers
        How many processes of the consuming stage take each payload.
    chunks
        Whether it carries streams of chunks; False also when that is not known.
    """

    name: str
    extra: Mapping[str, Any]
    readers: int = 1
    chunks: bool = False


@dataclass(frozen=True)
class Deployment:
    """The edges of a deployment; empty when this process knows of no deploy file."""

    edges: Mapping[Edge, EdgeSettings] = field(default_factory=dict)

    def leaving(self, stage: str) -> list[Edge]:
        """The edges on which a stage produces."""
        return [edge for edge in self.edges if edge.producer == stage]


def adopt_command_line(arguments: Sequence[str]) -> Path | None:
    """Take namespace and deploy file from a `vllm serve` command line, for this process and its children.

    What the environment says already stays.

    Returns
    -------
    Path or None
        The deploy file, in the process that found it.
    """
    address, port = (_option(arguments, f"--omni-master-{part}") for part in ("address", "port"))
    shared = f"vllm-{address}-{port}" if address and port else f"vllm-{uuid.uuid4().hex[:16]}"
    os.environ.setdefault(NAMESPACE_ENV, shared)
    deploy = _option(arguments, "--deploy-config")
    if deploy is None or DEPLOY_ENV in os.environ:
        return None
    path = Path(deploy).absolute()
    os.environ[DEPLOY_ENV] = str(path)
    return path


def _option(arguments: Sequence[str], name: str) -> str | None:
    for position, argument in enumerate(arguments):
        if argument == name and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


@functools.cache
def current_deployment() -> Deployment:
    """The deployment that the environment names."""
    path = os.environ.get(DEPLOY_ENV)
    if path is None:
        return Deployment()
    try:
        return read_deployment(Path(path))
    except ValueError:  # the engine, too, goes on without the connectors of a file that it cannot read
        return Deployment()


def read_deployment(path: Path) -> Deployment:
    """Read a deploy file as the engine does."""
    from vllm_omni.config.stage_config import resolve_deploy_yaml
    from vllm_omni.distributed.omni_connectors import load_omni_transfer_config

    deploy = resolve_deploy_yaml(path)
    transfer = load_omni_transfer_config(config_dict=deploy)
    stages = {str(stage["stage_id"]): stage for stage in deploy.get("stages") or ()}
    connectors = {} if transfer is None else transfer.connectors
    edges = {}
    for edge, spec in connectors.items():
        consumer = stages.get(edge[1], {})
        chunks = bool(deploy.get("async_chunk", True)) and consumer.get("async_chunk") is not False
        readers = 1 if chunks else _ranks(deploy, consumer)
        edges[Edge(*edge)] = EdgeSettings(spec.name, spec.extra, readers, chunks)
    return Deployment(edges)


def _ranks(deploy: Mapping[str, Any], consumer: Mapping[str, Any]) -> int:
    """Every pipeline-parallel rank of a stage polls for its full payloads; chunks are polled by the scheduler alone."""
    name = "pipeline_parallel_size"
    places = (consumer, consumer.get("engine_args"), consumer.get("engine_extras"), deploy)
    return int(next((place[name] for place in places if place and place.get(name)), 1))

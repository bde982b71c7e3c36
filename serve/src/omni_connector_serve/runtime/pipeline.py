"""A pipeline, checked: stages of ours on the edges of a deploy YAML.

The connector part of the file is vLLM-Omni's deploy schema, read by `omni_connector_core.config`; what serving adds is here::

    pipeline: reference
    connector: {type: shared_memory}
    stages:
      - stage_id: encode
        class: omni_connector_serve.reference.stages:Encode
      - stage_id: prefill
        class: omni_connector_serve.reference.stages:Prefill
        request: true
        tensor_parallel_size: 2
    edges:
      - {from: encode, to: prefill}

Every stage without an input, and each that says ``request: true``, is also given what the client sent; what a stage without a consumer
makes, the client gets. Those two kinds of edges run over ``serve: {connector: {type: BACKEND}}``, or else like the file's first edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from omni_connector_serve.runtime.messages import EdgeSpec
from omni_connector_serve.runtime.stage import REQUEST, RESPONSE

__all__ = ["ConnectorSpec", "Pipeline", "ServeSettings", "StageSpec", "connect"]

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class StageSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"class_path": "class"}):
    """One stage.

    Attributes
    ----------
    stage_id
        Its name in edges, errors and metrics.
    class_path
        ``module:Class``; ``class`` in YAML.
    options
        Handed to the stage as `StageContext.options`.
    request
        Whether it is given the client's request, beside what its producers make.
    tensor_parallel_size
        Processes that work on each request together.
    num_replicas
        Copies of the stage that work on different requests.
    timeout_s
        How long one request may be in the stage; then the stage is restarted.
    start_timeout_s
        How long its `setup` may take.
    """

    stage_id: str
    class_path: str
    options: dict[str, Any] = {}
    request: bool = False
    tensor_parallel_size: Count = 1
    num_replicas: Count = 1
    timeout_s: Seconds = 60.0
    start_timeout_s: Seconds = 300.0


class ConnectorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A backend and its options."""

    type: str
    extra: dict[str, Any] = {}


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``serve:`` part of a pipeline file.

    Attributes
    ----------
    host, port
        Where HTTP listens; port 0 takes a free one.
    connector
        What carries requests in and responses out.
    request_timeout_s
        Longest life of a request, which a client may shorten.
    max_requests
        How many are taken at a time; the next is told 429.
    max_body_bytes
        The largest request body.
    drain_s
        How long running requests may go on after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, lt=65536)] = 8000
    connector: ConnectorSpec | None = None
    request_timeout_s: Seconds = 300.0
    max_requests: Count = 64
    max_body_bytes: Count = 64 * 2**20
    drain_s: Seconds = 30.0


@dataclass(frozen=True)
class Pipeline:
    """Stages and the edges between them, request and response included."""

    name: str
    stages: Mapping[str, StageSpec]
    edges: tuple[EdgeSpec, ...]
    settings: ServeSettings = field(default_factory=ServeSettings)

    def inputs(self, stage: str) -> list[EdgeSpec]:
        """Return the edges that end at `stage`."""
        return [edge for edge in self.edges if edge.consumer == stage]

    def outputs(self, stage: str) -> list[EdgeSpec]:
        """Return the edges that start at `stage`."""
        return [edge for edge in self.edges if edge.producer == stage]


def connect(
    stages: list[StageSpec], edges: list[EdgeSpec], backend: str, options: dict[str, Any]
) -> tuple[EdgeSpec, ...]:
    """Complete `edges` by those from the request and to the response, which run over `backend`."""
    consumers = {edge.consumer for edge in edges}
    producers = {edge.producer for edge in edges}
    ends = [(REQUEST, stage.stage_id) for stage in stages if stage.request or stage.stage_id not in consumers]
    ends += [(stage.stage_id, RESPONSE) for stage in stages if stage.stage_id not in producers]
    edges = edges + [EdgeSpec(producer=a, consumer=b, backend=backend, options=options) for a, b in ends]
    ranks = {stage.stage_id: stage.tensor_parallel_size for stage in stages}
    return tuple(
        msgspec.structs.replace(edge, writers=ranks.get(edge.producer, 1), readers=ranks.get(edge.consumer, 1))
        for edge in edges
    )

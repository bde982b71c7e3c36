"""What orchestrator and workers tell each other; payloads never pass here.

Both ways are PUSH to PULL over unix sockets in a folder of the server's own, so that nothing is lost to a worker that is
not up yet. Messages are msgpack of one of the tagged structs below.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "Abort",
    "Announced",
    "Command",
    "Done",
    "EdgeSpec",
    "EdgeUse",
    "Failed",
    "Measure",
    "Measured",
    "Origin",
    "Output",
    "Ready",
    "Report",
    "Run",
    "Stop",
    "Took",
    "WorkerSpec",
]


class EdgeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One edge of the pipeline, and how many ranks there are at either end."""

    producer: str
    consumer: str
    backend: str
    options: dict[str, Any]
    writers: int = 1
    readers: int = 1

    @property
    def name(self) -> str:
        """The edge, as in tables and counters."""
        return f"{self.producer}->{self.consumer}"


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker process is told at its start, as JSON on stdin."""

    stage: str
    replica: int
    rank: int
    size: int
    generation: int
    class_path: str
    options: dict[str, Any]
    namespace: str
    inputs: list[EdgeSpec]
    outputs: list[EdgeSpec]
    root: str
    directory: str
    commands: str
    reports: str


class Announced(msgspec.Struct, frozen=True, kw_only=True):
    """An input that can be fetched: the producer's first put is done."""

    replica: int
    stream: bool
    metadata: dict[str, Any] | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Process one request."""

    request_id: str
    params: dict[str, Any]
    inputs: dict[str, Announced]
    timeout_s: float


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give up a request and discard its payloads; harmless when it is unknown or over."""

    request_id: str


class Measure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report the connectors' counters."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Exit; nothing is running."""


Command = Run | Abort | Measure | Stop


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Who reports: a restarted worker has a new generation."""

    stage: str
    replica: int
    rank: int
    generation: int


class EdgeUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one end of an edge moved for one request: the difference of its connector's counters.

    Attributes
    ----------
    wait_s
        Consumer's time until payloads were there; on an edge that is `streamed` the producer's own work is in it.
    """

    producer: str
    consumer: str
    puts: int = 0
    gets: int = 0
    put_bytes: int = 0
    get_bytes: int = 0
    put_s: float = 0.0
    wait_s: float = 0.0
    get_s: float = 0.0
    streamed: bool = False


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The stage is set up."""

    origin: Origin


class Took(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The stage begins with a request: from here on it is in the stage."""

    origin: Origin
    request_id: str


class Output(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first payload of a request for `consumer` is there."""

    origin: Origin
    request_id: str
    consumer: str
    announced: Announced


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The counters of every connector that the worker has open."""

    origin: Origin
    stats: list[dict[str, Any]]


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker is through with a request."""

    origin: Origin
    request_id: str
    edges: list[EdgeUse]
    busy_s: float


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker could not finish a request (or its setup, when `request_id` is empty).

    Attributes
    ----------
    kind
        "stage": it raised, and is to be restarted; "request": it refused the request; "input", "output": a payload from or to
        `neighbour` did not pass; "aborted".
    lost
        The payload is gone since the process that held it died.
    """

    origin: Origin
    request_id: str
    kind: str
    cause: str
    neighbour: str = ""
    lost: bool = False


Report = Ready | Took | Output | Measured | Done | Failed

"""What a stage sees of the runtime.

A stage is a class like this, anywhere on the import path; nothing needs to be inherited::

    class Upper:
        def setup(self, context: StageContext) -> None:
            self.suffix = context.options.get("suffix", "")

        def process(self, task: Task) -> Any:
            text = task.input("request")["text"]
            return {"text": text.upper() + self.suffix}

What `process` returns goes to every stage behind this one. If it returns an iterator (or is a generator), each value goes
out as it comes, and the next stage may read them with ``task.stream(...)`` while they are made. An optional ``close()`` is
called at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from omni_connector_serve.runtime.errors import RequestError

if TYPE_CHECKING:
    from omni_connector_core import OmniConnector

__all__ = ["REQUEST", "RESPONSE", "RequestError", "Stage", "StageContext", "Task"]

REQUEST = "request"
"""The producer's name under which a stage finds what the client sent."""
RESPONSE = "response"
"""The consumer's name of the edges that lead back to the client."""


@dataclass(frozen=True)
class StageContext:
    """What a stage is told at its start.

    Attributes
    ----------
    stage : str
        Its id in the pipeline.
    replica, rank, size : int
        Which copy of the stage this is, and which of the `size` tensor-parallel ranks of that copy.
    options : mapping
        ``options`` of the stage in the pipeline file.
    directory : Path
        A folder that the ranks of this copy share, new for each start: a rendezvous for process groups.
    producers, consumers : mapping of str to OmniConnector
        This stage's ends of its edges: producing ends by consumer, consuming ends by producer. For what `process` cannot
        say by its result, as a KV cache layer by layer.
    ranks : mapping of str to int
        How many ranks each neighbour has.
    """

    stage: str
    replica: int
    rank: int
    size: int
    options: Mapping[str, Any]
    directory: Path
    producers: Mapping[str, OmniConnector] = field(default_factory=dict)
    consumers: Mapping[str, OmniConnector] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)


class Stage(Protocol):
    """The shape of a stage."""

    def setup(self, context: StageContext) -> None:
        """Load what is needed; the stage is ready when this returns."""
        ...

    def process(self, task: Task) -> Any:
        """Process one request; with several ranks, what rank 0 returns counts."""
        ...


@dataclass(frozen=True)
class Task:
    """One request in one stage.

    Attributes
    ----------
    request_id : str
        The id under which its payloads travel.
    params : mapping
        ``params`` of the client's request.
    producers : mapping of str to int
        Where its inputs come from, and which replica made them; `REQUEST` among them if the stage gets the client's request.
    """

    request_id: str
    params: Mapping[str, Any]
    producers: Mapping[str, int]
    _fetch: Callable[[str], Any]
    _read: Callable[[str], Iterator[Any]]
    _cancelled: Callable[[], bool]

    def input(self, producer: str) -> Any:
        """Return the payload that `producer` made, when it made one; tensors in it are views, valid while they live."""
        return self._fetch(producer)

    def stream(self, producer: str) -> Iterator[Any]:
        """Iterate over the payloads that `producer` makes, as they come; a single one is a stream of one."""
        return self._read(producer)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the result any more; a stage that streams is stopped at its next value anyway."""
        return self._cancelled()

"""The copies of one stage, and the line of requests before them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omni_connector_serve.runtime.execution import Execution
from omni_connector_serve.runtime.group import StageGroup
from omni_connector_serve.runtime.messages import Output, Run, WorkerSpec
from omni_connector_serve.runtime.pipeline import Pipeline, StageSpec

__all__ = ["StagePool"]


class StagePool:
    """Gives each request, in turn, to the first group that is idle."""

    def __init__(self, stage: StageSpec, pipeline: Pipeline, namespace: str, root: Path, reports: str) -> None:
        self.stage = stage
        self._line: deque[Execution] = deque()
        self._served: dict[int, int] = {}
        index = list(pipeline.stages).index(stage.stage_id)  # a stage's name may be too long for a unix socket's path
        self.groups = []
        for replica in range(stage.num_replicas):
            workers = [
                WorkerSpec(
                    stage=stage.stage_id,
                    replica=replica,
                    rank=rank,
                    size=stage.tensor_parallel_size,
                    generation=0,
                    class_path=stage.class_path,
                    options=stage.options,
                    namespace=namespace,
                    inputs=pipeline.inputs(stage.stage_id),
                    outputs=pipeline.outputs(stage.stage_id),
                    root=str(root),
                    directory=str(root / f"{index}.{replica}"),
                    commands="",
                    reports=reports,
                )
                for rank in range(stage.tensor_parallel_size)
            ]
            self.groups.append(StageGroup(workers, stage.start_timeout_s, self._dispatch, self._line.appendleft))

    def submit(self, run: Run, on_output: Callable[[Output], None]) -> Execution:
        """Stand in line; cancelling the outcome leaves it."""
        execution = Execution(run, on_output)
        self._line.append(execution)
        self._dispatch()
        return execution

    @property
    def up(self) -> bool:
        """Whether a request may be taken: a group works, or is being restarted after it did."""
        return any(group.up for group in self.groups)

    @property
    def waiting(self) -> int:
        """How many requests stand in line."""
        return sum(not execution.outcome.done() for execution in self._line)

    @property
    def missing(self) -> str:
        """Why no group of the stage can work, or an empty string."""
        if any(group.state == "ready" for group in self.groups):
            return ""
        return f"stage {self.stage.stage_id!r} is {self.groups[0].state}: {self.groups[0].error}"

    def describe(self) -> dict[str, Any]:
        """Return the stage's state, ready for JSON."""
        return {
            "stage": self.stage.stage_id,
            "class": self.stage.class_path,
            "tensor_parallel_size": self.stage.tensor_parallel_size,
            "waiting": self.waiting,
            "replicas": [group.describe() for group in self.groups],
        }

    def _dispatch(self) -> None:
        while self._line:
            if not self._line[0].outcome.done():
                idle = [group for group in self.groups if group.idle]
                if not idle:
                    return
                group = min(idle, key=lambda group: self._served.get(group.replica, 0))
                self._served[group.replica] = self._served.get(group.replica, 0) + 1
                group.start(self._line[0])
            self._line.popleft()

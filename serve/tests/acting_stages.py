"""Stages that do what a request's params tell them, so that tests can put a request anywhere and break things there.

```params[stage]`` is a mapping, its keys obeyed in this order: `enter` (make this file in the folder of the pipeline),
`await` (wait until that file is there), `refuse`, `raise`, `exit`, `give` (of `GIVEN`, beside the text). With `count`
that many chunks are streamed, and the others obeyed after the first; `closed` is the file that tells of the stream's end.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from omni_connector_serve.runtime.stage import REQUEST, RequestError, StageContext, Task

GIVEN = {
    "no numbers": {
        "scores": np.array([[1.5, np.nan], [np.inf, 2]]),
        "loss": float("-inf"),
        "deep": [{"x": (np.nan, 1)}],
    },
    "complex numbers": {"spectrum": {"left": np.array([1 + 2j])}},
}


class Actor:
    def setup(self, context: StageContext) -> None:
        self.context = context
        self.folder = Path(context.options["folder"])
        if (self.folder / f"{context.stage}.broken").exists():
            raise RuntimeError("it was told to be broken")
        self.wait("start" if context.options.get("held") else None)

    def process(self, task: Task) -> Any:
        part = task.params.get(self.context.stage, {})
        text = self.read(task)
        if "enter" in part:
            (self.folder / part["enter"]).touch()
        if "count" in part:
            return self.stream(text, part)
        self.wait(part.get("await"))
        self.act(part)
        return {"text": f"{text}>{self.context.stage}", **GIVEN.get(part.get("give"), {})}

    def read(self, task: Task) -> str:
        [name] = task.producers
        if name == REQUEST:
            return task.input(REQUEST)["text"]
        return "+".join(value["text"] for value in task.stream(name))

    def stream(self, text: str, part: dict[str, Any]) -> Iterator[Any]:
        try:
            for number in range(part["count"]):
                yield {"text": f"{text}>{self.context.stage}.{number}", **GIVEN.get(part.get("give"), {})}
                if number == 0:
                    self.wait(part.get("await"))
                    self.act(part)
        finally:
            if "closed" in part:
                (self.folder / part["closed"]).touch()

    def wait(self, name: str | None) -> None:
        while name and not (self.folder / name).exists():
            time.sleep(0.002)

    def act(self, part: dict[str, Any]) -> None:
        if "refuse" in part:
            raise RequestError(part["refuse"])
        if "raise" in part:
            raise ValueError(part["raise"])
        if "exit" in part:
            os._exit(part["exit"])


class TwoRanks(Actor):
    """Adds the ranks' process ids by way of files, as tensor-parallel ranks exchange what they computed."""

    def process(self, task: Task) -> Any:
        text = self.read(task)
        context = self.context
        mine = context.directory / f"{task.request_id}.{context.rank}"
        part_written = mine.with_name(f"{mine.name}.part")
        part_written.write_text(str(os.getpid()))
        part_written.rename(mine)
        pids = set()
        for rank in range(context.size):
            other = context.directory / f"{task.request_id}.{rank}"
            while not other.exists():
                time.sleep(0.002)
            pids.add(other.read_text())
        part = task.params.get(context.stage, {})
        if part.get("rank") == context.rank:
            self.act(part)
        return {"text": f"{text}>{len(pids)} ranks"}

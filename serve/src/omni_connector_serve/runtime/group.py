"""The processes of one copy of one stage: started together, watched, restarted together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from omni_connector_serve.runtime.crew import Crew
from omni_connector_serve.runtime.errors import (
    RequestError,
    ServeError,
    StageFailedError,
    StageTimeoutError,
    TransferFailedError,
)
from omni_connector_serve.runtime.execution import Execution
from omni_connector_serve.runtime.messages import (
    Abort,
    Done,
    Failed,
    Measure,
    Measured,
    Output,
    Ready,
    Report,
    Took,
    WorkerSpec,
)

__all__ = ["StageGroup"]

_log = logging.getLogger(__name__)
_STOPPING = "the server is stopping"
_STOP_S = 5.0
_STUCK_S = 0.5
_MEASURE_S = 1.0
_SIBLING_S = 0.25
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class StageGroup:
    """Supervisor of the ranks of one replica.

    Parameters
    ----------
    workers
        One spec a rank; directory and generation are filled in at each start.
    start_timeout_s
        How long `setup` may take.
    changed
        Called when the group became idle or its state changed.
    give_back
        Called with an execution whose processes died before they began with it.

    Attributes
    ----------
    state : {"starting", "ready", "restarting", "stopped"}
    error : str
        Why it is not ready.
    up : bool
        Whether its last start came to a ready stage, so that waiting for a restart is worthwhile.
    first_start : Future of str
        Resolved after the first start: why it failed, or an empty string.
    starts : int
        How often its processes were started; the generation of those that run.
    """

    def __init__(
        self,
        workers: list[WorkerSpec],
        start_timeout_s: float,
        changed: Callable[[], None],
        give_back: Callable[[Execution], None],
    ) -> None:
        self.workers = workers
        self.stage = workers[0].stage
        self.replica = workers[0].replica
        self.state = "starting"
        self.error = "its processes are starting"
        self.up = False
        self.starts = 0
        self.first_start: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._measured: dict[int, asyncio.Future[list[dict[str, Any]]]] = {}
        self.current: Execution | None = None
        self._start_timeout_s = start_timeout_s
        self._changed = changed
        self._return = give_back
        self._crew = Crew([], 0)
        self._ready: set[int] = set()
        self._all_ready = asyncio.Event()
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stopping = asyncio.Event()
        self._supervisor = asyncio.create_task(self._supervise())

    @property
    def idle(self) -> bool:
        """Whether a request may be started."""
        return self.state == "ready" and self.current is None

    @property
    def restarts(self) -> int:
        """How often its processes were started again."""
        return max(0, self.starts - 1)

    def describe(self) -> dict[str, Any]:
        """Return the group's state, ready for JSON."""
        return {
            "replica": self.replica,
            "state": self.state,
            "error": self.error,
            "pids": self._crew.pids,
            "restarts": self.restarts,
            "request_id": self.current.run.request_id if self.current else None,
        }

    def start(self, execution: Execution) -> None:
        """Give it to every rank; the group is busy until all have reported, whether or not somebody waits for it."""
        self.current = execution
        execution.timer = asyncio.get_running_loop().call_later(execution.run.timeout_s, self._overdue, execution)
        self._crew.tell(execution.run)

    def abort(self, request_id: str) -> None:
        """Have every rank give up a request and discard its payloads."""
        self._crew.tell(Abort(request_id=request_id))

    async def measure(self) -> list[dict[str, Any]]:
        """Ask every rank for its connectors' counters; one that does not answer, as it starts or hangs, has none."""
        if self.state != "ready":
            return []
        if all(answer.done() for answer in self._measured.values()):
            loop = asyncio.get_running_loop()
            self._measured = {worker.rank: loop.create_future() for worker in self.workers}
            self._crew.tell(Measure())
        answers = list(self._measured.items())
        await asyncio.wait([answer for _, answer in answers], timeout=_MEASURE_S)
        process = {"stage": self.stage, "replica": str(self.replica)}
        return [
            {**row, **process, "rank": str(rank)}
            for rank, answer in answers
            if answer.done()
            for row in answer.result()
        ]

    def report(self, report: Report) -> None:
        """Take in a worker's report; one from before a restart is void."""
        if report.origin.generation != self.starts:
            return
        rank = report.origin.rank
        if isinstance(report, Ready):
            self._ready.add(rank)
            if len(self._ready) == len(self.workers):
                self._all_ready.set()
        elif isinstance(report, Failed) and not report.request_id:
            self._break(report.cause)
        elif isinstance(report, Measured):
            if not self._measured[rank].done():
                self._measured[rank].set_result(report.stats)
        elif self.current is not None and report.request_id == self.current.run.request_id:
            self._progress(self.current, report)

    async def close(self) -> None:
        """Stop the processes, by force those that do not go by themselves."""
        self._stopping.set()
        await self._supervisor

    def _progress(self, execution: Execution, report: Took | Output | Done | Failed) -> None:
        if isinstance(report, Took):
            execution.taken = True
        elif isinstance(report, Output):
            execution.on_output(report)
        else:
            if isinstance(report, Failed) and report.kind == "stage":
                # The death of another rank shows here as an exception, and sooner than as its exit.
                patience = _SIBLING_S if len(self.workers) > 1 else 0.0
                asyncio.get_running_loop().call_later(patience, self._raised, execution, report)
                return
            if isinstance(report, Failed):
                execution.fail(_error(self.stage, report))
            execution.done[report.origin.rank] = report
            if len(execution.done) == len(self.workers):
                if not execution.outcome.done():
                    execution.outcome.set_result([done for done in execution.done.values() if isinstance(done, Done)])
                self._release()

    def _raised(self, execution: Execution, report: Failed) -> None:
        execution.fail(_error(self.stage, report))
        if execution is self.current:
            self._break(report.cause)

    def _release(self) -> None:
        if self.current is not None and self.current.timer is not None:
            self.current.timer.cancel()
        self.current = None
        self._changed()

    def _lose(self, cause: str) -> None:
        """End or give back what the processes that are gone had been given."""
        if self.current is not None and not self.current.taken and not self._stopping.is_set():
            self._return(self.current)
        elif self.current is not None:
            self.current.fail(StageFailedError(self.stage, cause))
        self._release()

    def _overdue(self, execution: Execution) -> None:
        cause = f"not done after its timeout_s of {execution.run.timeout_s:g} s"
        execution.fail(StageTimeoutError(self.stage, cause))
        self._break(cause)

    def _break(self, cause: str) -> None:
        if not self._broken.done():
            self.state, self.error = "restarting", cause
            self._broken.set_result(cause)

    async def _supervise(self) -> None:
        pause = 0.0
        while not self._stopping.is_set():
            started = time.monotonic()
            cause = await self._live()
            if self._stopping.is_set():
                break
            _log.error("stage %r replica %d is restarted: %s", self.stage, self.replica, cause)
            self.up = self._all_ready.is_set()
            self._started(f"stage {self.stage!r} cannot be started: {cause}")
            served = self.up and time.monotonic() - started > pause
            pause = 0.0 if served else min(max(2 * pause, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
        self.state, self.error = "stopped", _STOPPING
        self._started(self.error)

    async def _live(self) -> str:
        """Run the processes once, from start to the end of all of them; return why they ended."""
        self.starts += 1
        self._ready.clear()
        self._all_ready.clear()
        self._measured.clear()
        self._broken = asyncio.get_running_loop().create_future()
        stopping = asyncio.create_task(self._stopping.wait())
        self._crew = Crew(self.workers, self.starts)
        patience_s = _STOP_S
        try:
            cause = await self._watch(self._crew, stopping)
            if self.current is not None:
                patience_s = _STUCK_S  # a process that is amid a request does not heed `Stop`
            self.state, self.error = "restarting", cause
            self._lose(cause)
            return cause
        finally:
            stopping.cancel()
            await self._crew.end(patience_s)

    async def _watch(self, crew: Crew, stopping: asyncio.Task[Any]) -> str:
        """Start the processes and return why they must end."""
        try:
            await crew.launch()
        except OSError as error:
            return f"its processes cannot be started: {error}"
        ready = asyncio.create_task(self._all_ready.wait())
        ends: list[asyncio.Future[Any]] = [stopping, self._broken, *crew.exits]
        waiting = asyncio.wait([ready, *ends], timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        done, _ = await waiting
        ready.cancel()
        if not done:
            return f"not set up after its start_timeout_s of {self._start_timeout_s:g} s"
        if self._all_ready.is_set():
            self.up = True
            self._started("")
            self.state, self.error = "ready", ""
            self._changed()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            return _STOPPING
        return self._broken.result() if self._broken.done() else crew.obituary()

    def _started(self, reason: str) -> None:
        if not self.first_start.done():
            self.first_start.set_result(reason)


def _error(stage: str, report: Failed) -> ServeError:
    match report.kind:
        case "request":
            return RequestError(f"stage {stage!r} refused the request: {report.cause}")
        case "input" | "output":
            return TransferFailedError(stage, report.cause, neighbour=report.neighbour, lost=report.lost)
        case _:
            return StageFailedError(stage, report.cause)

"""The processes of one copy of one stage: started together, watched, restarted together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

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
    Command,
    Done,
    Failed,
    Measure,
    Measured,
    Output,
    Ready,
    Report,
    Stop,
    Took,
    WorkerSpec,
)

__all__ = ["StageGroup"]

_log = logging.getLogger(__name__)
_STOP_S = 5.0
_MEASURE_S = 1.0
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
        self._processes: list[asyncio.subprocess.Process] = []
        self._commands: list[zmq.Socket[bytes]] = []
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
            "pids": [process.pid for process in self._processes if process.returncode is None],
            "restarts": self.restarts,
            "request_id": self.current.run.request_id if self.current else None,
        }

    def start(self, execution: Execution) -> None:
        """Give it to every rank; the group is busy until all have reported, whether or not somebody waits for it."""
        self.current = execution
        execution.timer = asyncio.get_running_loop().call_later(execution.run.timeout_s, self._overdue, execution)
        self._tell(execution.run)

    def abort(self, request_id: str) -> None:
        """Have every rank give up a request and discard its payloads."""
        self._tell(Abort(request_id=request_id))

    async def measure(self) -> list[dict[str, Any]]:
        """Ask every rank for its connectors' counters; one that does not answer, as it starts or hangs, has none."""
        if self.state != "ready":
            return []
        if all(answer.done() for answer in self._measured.values()):
            loop = asyncio.get_running_loop()
            self._measured = {worker.rank: loop.create_future() for worker in self.workers}
            self._tell(Measure())
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
            execution.done[report.origin.rank] = report
            if isinstance(report, Failed):
                execution.fail(_error(self.stage, report))
                if report.kind == "stage":
                    self._break(report.cause)
                    return
            if len(execution.done) == len(self.workers):
                if not execution.outcome.done():
                    execution.outcome.set_result([done for done in execution.done.values() if isinstance(done, Done)])
                self._release()

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

    def _tell(self, command: Command) -> None:
        message = msgspec.msgpack.encode(command)
        for commands in self._commands:
            with contextlib.suppress(
                zmq.Again
            ):  # thousands are waiting there: it is stuck, and its timeout will end it
                commands.send(message, zmq.NOBLOCK)

    async def _supervise(self) -> None:
        pause = 0.0
        while not self._stopping.is_set():
            started = time.monotonic()
            cause = await self._live()
            if self._stopping.is_set():
                break
            self.state, self.error = "restarting", cause
            _log.error("stage %r replica %d is restarted: %s", self.stage, self.replica, cause)
            self._lose(cause)
            self.up = self._all_ready.is_set()
            self._started(f"stage {self.stage!r} cannot be started: {cause}")
            served = self.up and time.monotonic() - started > pause
            pause = 0.0 if served else min(max(2 * pause, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
        self.state, self.error = "stopped", "the server is stopping"
        self._started(self.error)
        self._lose(self.error)

    async def _live(self) -> str:
        """Run the processes once, from start to the end of all of them; return why they ended."""
        self.starts += 1
        self._ready.clear()
        self._all_ready.clear()
        self._measured.clear()
        self._broken = asyncio.get_running_loop().create_future()
        folder = Path(self.workers[0].directory) / str(self.starts)
        folder.mkdir(parents=True, mode=0o700)
        self._processes.clear()
        stopping = asyncio.create_task(self._stopping.wait())
        exits: list[asyncio.Task[int]] = []
        try:
            for worker in self.workers:
                address = f"ipc://{folder}/c{worker.rank}"
                spec = msgspec.structs.replace(worker, generation=self.starts, directory=str(folder), commands=address)
                commands: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
                commands.linger = 0
                commands.connect(address)
                self._commands.append(commands)
                process = await _launch(spec)
                self._processes.append(process)
                exits.append(asyncio.create_task(process.wait()))
            ready = asyncio.create_task(self._all_ready.wait())
            ends: list[asyncio.Future[Any]] = [stopping, self._broken, *exits]
            done, _ = await asyncio.wait(
                [ready, *ends], timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
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
                return "the server is stopping"
            if self._broken.done():
                return self._broken.result()
            return self._obituary(exits)
        finally:
            if self.state == "ready":
                self.state, self.error = "restarting", "its processes are ending"
            stopping.cancel()
            await self._end(exits, folder)

    def _started(self, reason: str) -> None:
        if not self.first_start.done():
            self.first_start.set_result(reason)

    def _obituary(self, exits: list[asyncio.Task[int]]) -> str:
        rank = next(rank for rank, task in enumerate(exits) if task.done())
        code = exits[rank].result()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"its process {self._processes[rank].pid} (rank {rank}) {how}"

    async def _end(self, exits: list[asyncio.Task[int]], folder: Path) -> None:
        self._tell(Stop())
        if exits:
            # Only idle processes heed Stop; those that are stuck or mid-request must not keep the others waiting.
            patience = _STOP_S if self.current is None else 0.5
            _, alive = await asyncio.wait(exits, timeout=patience)
            for process in self._processes:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
            if alive:
                await asyncio.wait(alive)
        for commands in self._commands:
            commands.close()
        self._commands.clear()
        shutil.rmtree(folder, ignore_errors=True)


def _error(stage: str, report: Failed) -> ServeError:
    match report.kind:
        case "request":
            return RequestError(f"stage {stage!r} refused the request: {report.cause}")
        case "input" | "output":
            return TransferFailedError(stage, report.cause, neighbour=report.neighbour, lost=report.lost)
        case _:
            return StageFailedError(stage, report.cause)


async def _launch(spec: WorkerSpec) -> asyncio.subprocess.Process:
    # A session of its own: Ctrl-C in a terminal reaches the server alone, which then drains. The worker ends when its
    # stdin does, so none outlives a server that is killed.
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "omni_connector_serve.runtime.worker",
        stdin=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(spec) + b"\n")
    return process

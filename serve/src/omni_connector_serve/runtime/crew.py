"""The processes of one start of a stage: launched together, told together, ended together."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
from pathlib import Path

import msgspec
import zmq

from omni_connector_serve.runtime.messages import Command, Stop, WorkerSpec

__all__ = ["Crew"]


class Crew:
    """One process a rank.

    Parameters
    ----------
    workers
        One spec a rank; what belongs to this start is filled in.
    generation
        Number of the start.

    Attributes
    ----------
    exits : list of Task of int
        Each process' exit code, once it ended.
    """

    def __init__(self, workers: list[WorkerSpec], generation: int) -> None:
        self._workers = workers
        self._generation = generation
        self._processes: list[asyncio.subprocess.Process] = []
        self._commands: list[zmq.Socket[bytes]] = []
        self._folder: Path | None = None
        self.exits: list[asyncio.Task[int]] = []

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that live."""
        return [process.pid for process in self._processes if process.returncode is None]

    async def launch(self) -> None:
        """Start all processes; raises OSError when the system cannot."""
        self._folder = folder = Path(self._workers[0].directory) / str(self._generation)
        folder.mkdir(parents=True, mode=0o700)
        for worker in self._workers:
            address = f"ipc://{folder}/c{worker.rank}"
            changes = {"generation": self._generation, "directory": str(folder), "commands": address}
            commands: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
            commands.linger = 0
            commands.connect(address)
            self._commands.append(commands)
            process = await _launch(msgspec.structs.replace(worker, **changes))
            self._processes.append(process)
            self.exits.append(asyncio.create_task(process.wait()))

    def tell(self, command: Command) -> None:
        """Send a command to every process."""
        message = msgspec.msgpack.encode(command)
        for commands in self._commands:
            # Again: thousands are waiting there. The process is stuck, and a timeout will end it.
            with contextlib.suppress(zmq.Again):
                commands.send(message, zmq.NOBLOCK)

    def obituary(self) -> str:
        """Say how the first process that ended did so."""
        rank = next(rank for rank, task in enumerate(self.exits) if task.done())
        code = self.exits[rank].result()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"its process {self._processes[rank].pid} (rank {rank}) {how}"

    async def end(self, patience_s: float) -> None:
        """Ask all processes to end, and after `patience_s` seconds make them; remove what they leave."""
        self.tell(Stop())
        if self.exits:
            _, alive = await asyncio.wait(self.exits, timeout=patience_s)
            for process in self._processes:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
            if alive:
                await asyncio.wait(alive)
        for commands in self._commands:
            commands.close()
        self._commands.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


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

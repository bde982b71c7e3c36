"""What the tests of this package share: one edge in a runtime folder of its own, with peers in processes of their own."""

from __future__ import annotations

import multiprocessing
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from omni_connector_core import OmniConnector, Role, create_connector

Script = Callable[[OmniConnector, Connection], None]
spawn = multiprocessing.get_context("spawn")


def run(script: Script, pipe: Connection, opening: dict[str, Any]) -> None:
    with create_connector("shared_memory", **opening) as conn:
        script(conn, pipe)


class Edge:
    """One edge; `open` opens an end in this process, `peer` one in another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.namespace = uuid.uuid4().hex

    def opening(self, role: Role, config: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        config = {"runtime_dir": str(self.folder), "timeout_s": 20.0} | (config or {})
        return {"config": config, "namespace": self.namespace, "role": role.value, **options}

    def open(self, role: Role = Role.BOTH, config: dict[str, Any] | None = None, **options: Any) -> OmniConnector:
        return create_connector("shared_memory", **self.opening(role, config, **options))

    @contextmanager
    def peer(self, script: Script, role: Role, **options: Any) -> Iterator[tuple[Connection, BaseProcess]]:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=run, args=(script, theirs, self.opening(role, **options)))
        process.start()
        theirs.close()
        try:
            yield ours, process
        finally:
            ours.close()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []


def produce(conn: OmniConnector, pipe: Connection) -> None:
    """Put what comes through the pipe, answer with the metadata; the pipe's end is the end."""
    pipe.send("ready")
    while True:
        try:
            key, payload, options = pipe.recv()
        except EOFError:
            return
        pipe.send(conn.put(key, payload, **options))


def eventually(holds: Callable[[], bool], within_s: float = 10.0) -> bool:
    """Ask until it holds; False if it does not within a generous time."""
    end_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.002)
    return True

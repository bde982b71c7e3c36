"""Payloads between real processes, over the public API."""

from __future__ import annotations

import multiprocessing
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_connector_core import OmniConnector, Role, create_connector

Script = Callable[[OmniConnector, Connection], None]


def run(script: Script, pipe: Connection, namespace: str, runtime_dir: str, role: str, options: dict[str, Any]) -> None:
    config = {"runtime_dir": runtime_dir, "timeout_s": 10.0} | options.pop("config", {})
    with create_connector("shared_memory", config, namespace=namespace, role=role, **options) as conn:
        script(conn, pipe)


class Edge:
    """One edge in a runtime folder of its own, with peers in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.namespace = uuid.uuid4().hex

    def open(self, role: Role = Role.BOTH, config: dict[str, Any] | None = None, **options: Any) -> OmniConnector:
        config = {"runtime_dir": str(self.folder), "timeout_s": 10.0} | (config or {})
        return create_connector("shared_memory", config, namespace=self.namespace, role=role, **options)

    @contextmanager
    def peer(self, script: Script, role: Role, **options: Any) -> Iterator[tuple[Connection, Any]]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=run, args=(script, theirs, self.namespace, str(self.folder), role.value, options)
        )
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


@pytest.fixture
def edge(tmp_path: Path) -> Edge:
    return Edge(tmp_path / "run")


def put_what_is_asked_for(conn: OmniConnector, pipe: Connection) -> None:
    pipe.send("ready")
    while True:
        try:
            key, payload, options = pipe.recv()
        except EOFError:
            return
        pipe.send(conn.put(key, payload, **options))


def test_the_consumer_gets_what_another_process_put(edge: Edge) -> None:
    payload = {"a": np.arange(100_000, dtype=np.int32), "b": (1, "x", None)}
    with edge.peer(put_what_is_asked_for, Role.PRODUCER) as (pipe, _), edge.open(Role.CONSUMER) as conn:
        pipe.recv()
        for where in (None, "metadata"):
            pipe.send(("k", payload, {}))
            metadata = pipe.recv()
            got = conn.get("k", metadata if where else None)
            assert (got["a"] == payload["a"]).all()
            assert got["b"] == payload["b"]


def test_a_consumer_may_wait_before_the_producer_exists(edge: Edge) -> None:
    with edge.open(Role.CONSUMER) as conn:
        handle = conn.submit_get("k")
        assert not handle.done()
        with edge.peer(put_what_is_asked_for, Role.PRODUCER) as (pipe, _):
            pipe.recv()
            pipe.send(("k", b"x", {}))
            assert handle.result(10) == b"x"
            pipe.recv()

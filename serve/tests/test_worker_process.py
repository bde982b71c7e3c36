"""One worker, driven by hand where a server could only be hit by chance."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from serving_process import CONNECTOR, DEADLINE_S, TESTS, eventually

from omni_connector_core import Edge, create_connector
from omni_connector_serve.runtime.messages import Announced, EdgeSpec, Ready, Report, Run, Stop, Took, WorkerSpec


class Worker:
    """A worker process and the two sockets of its server."""

    def __init__(self, folder: Path) -> None:
        self.namespace = f"test-{os.getpid()}-{folder.name}"
        self.edge = EdgeSpec(producer="request", consumer="a", backend=CONNECTOR, options={})
        self.spec = WorkerSpec(
            stage="a",
            replica=0,
            rank=0,
            size=1,
            generation=1,
            class_path="acting_stages:Actor",
            options={"folder": str(folder)},
            namespace=self.namespace,
            inputs=[self.edge],
            outputs=[],
            root=str(folder / "root"),
            directory=str(folder / "root"),
            commands=f"ipc://{folder}/c",
            reports=f"ipc://{folder}/r",
        )
        self.context = zmq.Context()
        self.reports = self.context.socket(zmq.PULL)
        self.reports.bind(self.spec.reports)
        self.commands = self.context.socket(zmq.PUSH)
        self.commands.connect(self.spec.commands)
        command = [sys.executable, "-m", "omni_connector_serve.runtime.worker"]
        env = {**os.environ, "PYTHONPATH": str(TESTS)}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env)
        assert self.process.stdin is not None
        self.stdin = self.process.stdin
        self.stdin.write(msgspec.json.encode(self.spec) + b"\n")
        self.stdin.flush()

    def heard(self, kind: type[Report]) -> Report:
        """Wait for the next report, of that kind."""
        assert self.reports.poll(DEADLINE_S * 1000)
        report = msgspec.msgpack.decode(self.reports.recv(), type=Report)
        assert isinstance(report, kind), report
        return report

    def tell(self, command: bytes | Run | Stop) -> None:
        self.commands.send(command if isinstance(command, bytes) else msgspec.msgpack.encode(command))


def refuses(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) != 0


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    (tmp_path / "root").mkdir()
    worker = Worker(tmp_path)
    try:
        worker.heard(Ready)
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()
        worker.stdin.close()
        worker.context.destroy(linger=0)


def test_a_worker_that_was_told_to_stop_amid_a_request_still_ends_with_its_server(
    worker: Worker, tmp_path: Path
) -> None:
    edge = Edge("request", "a")
    with create_connector(CONNECTOR, {}, edge=edge, role="producer", namespace=worker.namespace) as request:
        request.put("r", {"text": "x"})
        params = {"a": {"enter": "in", "await": "never"}}
        worker.tell(
            Run(request_id="r", params=params, inputs={"request": Announced(replica=0, stream=False)}, timeout_s=60)
        )
        worker.heard(Took)
        eventually((tmp_path / "in").exists)
        worker.tell(Stop())
        eventually(lambda: refuses(tmp_path / "c"))  # it has obeyed, and listens no more
        worker.stdin.close()
        assert worker.process.wait(DEADLINE_S) == 1
        assert not (tmp_path / "root").exists()


def test_junk_on_the_command_socket_is_passed_over(worker: Worker) -> None:
    for junk in (b"", b"\xff" * 100, b"\x81\xa4type\xa4Nope", os.urandom(5000)):
        worker.tell(junk)
    worker.tell(Stop())
    assert worker.process.wait(DEADLINE_S) == 0

"""The process of one rank of a stage: ``python -m omni_connector_serve.runtime.worker``, told what it is on stdin.

The main thread sets the stage up and processes one request after another; a second thread takes commands, so that an
abort reaches a connector in which the main thread waits. The process ends when stdin does: when its server is gone,
however that ended.
"""

from __future__ import annotations

import importlib
import logging
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from omni_connector_core import OmniConnector, OmniConnectorError, PeerLostError
from omni_connector_serve.runtime.channel import Sink, Source, open_end
from omni_connector_serve.runtime.errors import RequestError
from omni_connector_serve.runtime.messages import (
    Abort,
    Announced,
    Command,
    Done,
    EdgeSpec,
    EdgeUse,
    Failed,
    Measure,
    Measured,
    Origin,
    Output,
    Ready,
    Report,
    Run,
    Stop,
    Took,
    WorkerSpec,
)
from omni_connector_serve.runtime.stage import StageContext, Task

_log = logging.getLogger("omni_connector_serve.worker")
_COMMANDS = msgspec.msgpack.Decoder(Command)
_LINGER_MS = 2000
_ABORTED_KEPT = 1000


class Worker:
    """One rank of a stage."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._origin = Origin(stage=spec.stage, replica=spec.replica, rank=spec.rank, generation=spec.generation)
        self._zmq = zmq.Context()
        self._reports = self._open_reports()
        self._runs: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._aborted: dict[str, None] = {}
        self._producers: dict[str, OmniConnector] = {}
        self._consumers: dict[str, OmniConnector] = {}

    def serve(self) -> None:
        """Set the stage up and process what comes, until told to stop."""
        with ExitStack() as ends:
            for edge in self._spec.outputs:
                self._producers[edge.consumer] = ends.enter_context(open_end(edge, self._spec))
            for edge in self._spec.inputs:
                self._consumers[edge.producer] = ends.enter_context(open_end(edge, self._spec))
            commands: zmq.Socket[bytes] = self._zmq.socket(zmq.PULL)
            commands.bind(self._spec.commands)
            threading.Thread(target=self._listen, args=(commands,), name="commands", daemon=True).start()
            stage = self._set_up()
            while (run := self._runs.get()) is not None:
                self._process(stage, run)
            if stage is not None and hasattr(stage, "close"):
                stage.close()
        self._reports.close()
        self._zmq.term()

    def _listen(self, commands: zmq.Socket[bytes]) -> None:
        try:
            poller = zmq.Poller()
            poller.register(commands, zmq.POLLIN)
            poller.register(sys.stdin.fileno(), zmq.POLLIN)
            with commands, self._open_reports() as reports:
                while self._obey(dict(poller.poll()), commands, reports):
                    pass
            while os.read(sys.stdin.fileno(), 1):  # the stage may be amid a request, and its server may still die
                pass
            self._orphaned()
        except Exception:  # noqa: BLE001 - whatever it is
            _log.exception("the process takes no commands any more")
            os._exit(1)  # to be restarted, rather than to go on deaf

    def _obey(self, events: dict[Any, int], commands: zmq.Socket[bytes], reports: zmq.Socket[bytes]) -> bool:
        """Carry out the command that has come; returns whether more may come."""
        if sys.stdin.fileno() in events:
            self._orphaned()
        try:
            command = _COMMANDS.decode(commands.recv())
        except msgspec.DecodeError as error:
            _log.error("a command is not understood: %s", error)
            return True
        match command:
            case Run():
                self._runs.put(command)
            case Abort():
                self._abort(command.request_id)
            case Measure():
                measured = Measured(origin=self._origin, stats=list(self._stats().values()))
                reports.send(msgspec.msgpack.encode(measured))
            case Stop():
                self._runs.put(None)
                return False
        return True

    def _orphaned(self) -> None:
        """End at once: the server died, and nobody is left to report to, or to clear its folder."""
        shutil.rmtree(self._spec.root, ignore_errors=True)
        os._exit(1)

    def _open_reports(self) -> zmq.Socket[bytes]:
        reports: zmq.Socket[bytes] = self._zmq.socket(zmq.PUSH)  # one for each thread
        reports.linger = _LINGER_MS
        reports.connect(self._spec.reports)
        return reports

    def _abort(self, request_id: str) -> None:
        self._aborted[request_id] = None
        if len(self._aborted) > _ABORTED_KEPT:
            del self._aborted[next(iter(self._aborted))]
        for connector in (*self._producers.values(), *self._consumers.values()):
            try:
                connector.cleanup(request_id)
            except OmniConnectorError as error:
                _log.warning("request %s is not cleaned up: %s", request_id, error)

    def _set_up(self) -> Any:
        spec = self._spec
        try:
            module, _, name = spec.class_path.partition(":")
            stage = getattr(importlib.import_module(module), name)()
            stage.setup(
                StageContext(
                    stage=spec.stage,
                    replica=spec.replica,
                    rank=spec.rank,
                    size=spec.size,
                    options=spec.options,
                    directory=Path(spec.directory),
                    producers=self._producers,
                    consumers=self._consumers,
                    ranks={
                        **{edge.producer: edge.writers for edge in spec.inputs},
                        **{edge.consumer: edge.readers for edge in spec.outputs},
                    },
                )
            )
        except Exception as error:  # noqa: BLE001 - foreign code: whatever it raises is reported, then it is restarted
            _log.exception("stage %r cannot be set up", spec.stage)
            self._report(Failed(origin=self._origin, request_id="", kind="stage", cause=f"setup: {_line(error)}"))
            return None
        self._report(Ready(origin=self._origin))
        return stage

    def _process(self, stage: Any, run: Run) -> None:
        self._report(Took(origin=self._origin, request_id=run.request_id))
        started = time.perf_counter()
        before = self._stats()
        deadline = time.monotonic() + run.timeout_s
        sources = {
            name: Source(self._consumers[name], run.request_id, at, name, deadline) for name, at in run.inputs.items()
        }
        # Rank 0 speaks for all ranks; what the others have to send goes through `context.producers`.
        edges = self._spec.outputs if self._spec.rank == 0 else []
        sinks = [Sink(self._producers[edge.consumer], run.request_id, edge, deadline) for edge in edges]
        task = Task(
            request_id=run.request_id,
            params=run.params,
            producers={name: announced.replica for name, announced in run.inputs.items()},
            _fetch=lambda name: _source(sources, name).whole(),
            _read=lambda name: _source(sources, name).stream(),
            _cancelled=lambda: run.request_id in self._aborted,
        )
        try:
            result = stage.process(task)
            self._send(result, run.request_id, sinks)
        except Exception as error:  # noqa: BLE001 - as above
            failure = self._failure(error, run.request_id)
            for sink in sinks:
                sink.fail(f"stage {self._spec.stage!r}: {failure.cause}")
            self._report(failure)
        else:
            after = self._stats()
            streamed = isinstance(result, Iterator)
            uses = [_use(edge, before, after, streamed=streamed) for edge in self._spec.outputs]
            uses += [_use(edge, before, after, streamed=run.inputs[edge.producer].stream) for edge in self._spec.inputs]
            busy_s = time.perf_counter() - started
            self._report(Done(origin=self._origin, request_id=run.request_id, edges=uses, busy_s=busy_s))
        finally:
            for source in sources.values():
                source.discard_unread()

    def _send(self, result: Any, request_id: str, sinks: list[Sink]) -> None:
        if not isinstance(result, Iterator):
            for sink in sinks:
                self._announce(sink, request_id, stream=False, metadata=sink.put(result))
            return
        # A generator that is left early is closed here and now: it may hold what others need.
        with closing(result) if isinstance(result, Generator) else nullcontext():
            announced = False
            for value in result:
                for sink in sinks:
                    sink.write(value)
                    if not announced:
                        self._announce(sink, request_id, stream=True)
                announced = True
                if request_id in self._aborted:
                    return
            for sink in sinks:
                sink.end()
                if not announced:
                    self._announce(sink, request_id, stream=True)

    def _announce(self, sink: Sink, request_id: str, *, stream: bool, metadata: dict[str, Any] | None = None) -> None:
        announced = Announced(replica=self._spec.replica, stream=stream, metadata=metadata)
        self._report(Output(origin=self._origin, request_id=request_id, consumer=sink.consumer, announced=announced))

    def _failure(self, error: Exception, request_id: str) -> Failed:
        failed = partial(Failed, origin=self._origin, request_id=request_id)
        if isinstance(error, RequestError):
            return failed(kind="request", cause=str(error))
        edge = error.edge if isinstance(error, OmniConnectorError) else None
        for kind, ends, neighbour in (("input", self._consumers, 0), ("output", self._producers, 1)):
            if edge is not None and edge in (end.edge for end in ends.values()):
                kind = "aborted" if request_id in self._aborted else kind
                lost = isinstance(error, PeerLostError)
                return failed(kind=kind, cause=_line(error), neighbour=edge[neighbour], lost=lost)
        _log.error("stage %r failed on request %s", self._spec.stage, request_id, exc_info=error)
        return failed(kind="stage", cause=_line(error))

    def _report(self, report: Report) -> None:
        self._reports.send(msgspec.msgpack.encode(report))

    def _stats(self) -> dict[str, Any]:
        ends = [(edge, self._producers[edge.consumer]) for edge in self._spec.outputs]
        ends += [(edge, self._consumers[edge.producer]) for edge in self._spec.inputs]
        return {edge.name: connector.stats() for edge, connector in ends}


def _source(sources: dict[str, Source], name: str) -> Source:
    if name not in sources:
        raise LookupError(f"there is no input from {name!r}; this stage has {', '.join(map(repr, sources)) or 'none'}")
    return sources[name]


def _use(edge: EdgeSpec, before: dict[str, Any], after: dict[str, Any], *, streamed: bool) -> EdgeUse:
    old, new = before[edge.name], after[edge.name]
    return EdgeUse(
        producer=edge.producer,
        consumer=edge.consumer,
        puts=new["puts"] - old["puts"],
        gets=new["gets"] - old["gets"],
        put_bytes=new["put_bytes"] - old["put_bytes"],
        get_bytes=new["get_bytes"] - old["get_bytes"],
        put_s=new["put_time"]["sum_s"] - old["put_time"]["sum_s"],
        wait_s=new["wait_time"]["sum_s"] - old["wait_time"]["sum_s"],
        get_s=new["get_time"]["sum_s"] - old["get_time"]["sum_s"],
        streamed=streamed,
    )


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")


def main() -> None:
    """Read the spec, one line of JSON, and serve."""
    # Unbuffered: stdin is also watched for its end, which a buffer would hide.
    line = bytearray()
    while not line.endswith(b"\n"):
        line += os.read(sys.stdin.fileno(), 1) or sys.exit(1)
    spec = msgspec.json.decode(line, type=WorkerSpec)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {spec.stage}/{spec.replica}/{spec.rank} %(levelname)s %(message)s"
    )
    Worker(spec).serve()


if __name__ == "__main__":
    main()

"""Takes requests through a pipeline: announces outputs to consumers, keeps time, and says which stage is to blame."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import zmq
import zmq.asyncio

from omni_connector_core import Edge, OmniConnector, OmniConnectorError, PeerLostError, Role, create_connector
from omni_connector_serve.runtime.channel import Sink, Source
from omni_connector_serve.runtime.errors import (
    BusyError,
    RequestTimeoutError,
    ServeError,
    TransferFailedError,
    UnavailableError,
)
from omni_connector_serve.runtime.flight import Flight
from omni_connector_serve.runtime.messages import Announced, Done, EdgeSpec, EdgeUse, Output, Report, Run
from omni_connector_serve.runtime.pipeline import Pipeline
from omni_connector_serve.runtime.pool import StagePool
from omni_connector_serve.runtime.stage import REQUEST, RESPONSE

__all__ = ["Orchestrator"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_ATTEMPTS = 3
_VERDICT_S = 2.0


class _Attempt:
    """One passage of a request through the pipeline; a repeated one has an id of its own, so that no payloads mix."""

    def __init__(self, flight: Flight, number: int, edges: tuple[EdgeSpec, ...]) -> None:
        loop = asyncio.get_running_loop()
        self.flight = flight
        self.request_id = f"{flight.request_id}.{number}"
        self.announced = {(edge.producer, edge.consumer): loop.create_future() for edge in edges}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def on_output(self, report: Output) -> None:
        """Let the consumer begin."""
        announced: asyncio.Future[Announced] = self.announced[report.origin.stage, report.consumer]
        if not announced.done():
            announced.set_result(report.announced)


class Orchestrator:
    """A pipeline that runs. Use as an async context manager; make it inside the event loop.

    Parameters
    ----------
    pipeline
        What to run.
    namespace
        Of its connectors; by default one that no other server has.
    """

    def __init__(self, pipeline: Pipeline, namespace: str | None = None) -> None:
        self.pipeline = pipeline
        self.namespace = namespace or os.environ.get("OMNI_CONNECTOR_NAMESPACE") or f"serve-{uuid.uuid4().hex[:12]}"
        self.draining = False
        self.outcomes: dict[str, int] = {}
        self.flights: set[Flight] = set()
        self._ends = {edge.name: self._open(edge) for edge in (*pipeline.outputs(REQUEST), *pipeline.inputs(RESPONSE))}
        self._root = Path(tempfile.mkdtemp(prefix="omni-serve-", dir=os.environ.get("XDG_RUNTIME_DIR")))
        self._threads = ThreadPoolExecutor(4 * pipeline.settings.max_requests, thread_name_prefix="omni-serve")
        self._zmq = zmq.asyncio.Context()
        self._reports = self._zmq.socket(zmq.PULL)
        address = f"ipc://{self._root}/reports"
        self._reports.bind(address)
        self.pools = {
            name: StagePool(stage, pipeline, self.namespace, self._root, address)
            for name, stage in pipeline.stages.items()
        }
        self._listener = asyncio.create_task(self._listen())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def missing(self) -> str:
        """Why requests cannot be served, or an empty string."""
        if self.draining:
            return "the server is stopping"
        return "; ".join(filter(None, (pool.missing for pool in self.pools.values())))

    async def ready(self) -> None:
        """Wait until every stage has started for the first time.

        Raises
        ------
        UnavailableError
            One could not; it is tried again.
        """
        groups = [group for pool in self.pools.values() for group in pool.groups]
        for reason in await asyncio.gather(*(asyncio.shield(group.first_start) for group in groups)):
            if reason:
                raise UnavailableError(reason)

    async def stats(self) -> list[dict[str, Any]]:
        """Return the counters of every open connector, each with stage, replica and rank of the process that holds it."""
        groups = [group for pool in self.pools.values() for group in pool.groups]
        rows = [row for rows in await asyncio.gather(*(group.measure() for group in groups)) for row in rows]
        server = {"stage": "serve", "replica": "0", "rank": "0"}
        return rows + [{**end.stats(), **server} for end in self._ends.values()]

    def generate(self, payload: Any, params: dict[str, Any], timeout_s: float | None = None) -> Flight:
        """Start a request.

        Parameters
        ----------
        payload
            What the stages find as ``task.input("request")``.
        params
            What they find as ``task.params``: small, plain data.
        timeout_s
            Shortens the server's ``request_timeout_s``.

        Raises
        ------
        UnavailableError, BusyError
            It is not taken.
        """
        settings = self.pipeline.settings
        if self.draining or not all(pool.up for pool in self.pools.values()):
            raise UnavailableError(self.missing)
        if len(self.flights) >= settings.max_requests:
            raise BusyError(f"{settings.max_requests} requests are running; try again later")
        flight = Flight(payload, params, min(timeout_s or settings.request_timeout_s, settings.request_timeout_s))
        flight.task = asyncio.create_task(self._fly(flight))
        self.flights.add(flight)
        flight.task.add_done_callback(lambda task: self._landed(flight, task))
        return flight

    async def close(self) -> None:
        """Give up what still runs, and stop all processes."""
        self.draining = True
        for flight in list(self.flights):
            await flight.cancel()
        await asyncio.gather(*(group.close() for pool in self.pools.values() for group in pool.groups))
        self._listener.cancel()
        await asyncio.wait((self._listener,))
        for end in self._ends.values():
            end.close()
        self._reports.close(linger=0)
        self._zmq.term()
        self._threads.shutdown()
        shutil.rmtree(self._root, ignore_errors=True)

    def _open(self, edge: EdgeSpec) -> OmniConnector:
        role = Role.PRODUCER if edge.producer == REQUEST else Role.CONSUMER
        return create_connector(
            edge.backend,
            dict(edge.options),
            edge=Edge(edge.producer, edge.consumer),
            role=role,
            namespace=self.namespace,
        )

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(Report)
        while True:
            try:
                report = decoder.decode(await self._reports.recv())
                self.pools[report.origin.stage].groups[report.origin.replica].report(report)
            except (msgspec.DecodeError, LookupError) as error:
                _log.error("a report is not understood: %s", error)

    def _landed(self, flight: Flight, task: asyncio.Task[None]) -> None:
        self.flights.discard(flight)
        flight.total_s = time.monotonic() - flight.started
        error = None if task.cancelled() else task.exception()
        outcome = "cancelled" if task.cancelled() else type(error).__name__ if error else "ok"
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    async def _fly(self, flight: Flight) -> None:
        try:
            async with asyncio.timeout(flight.timeout_s):
                for number in range(_ATTEMPTS):
                    try:
                        return await self._attempt(_Attempt(flight, number, self.pipeline.edges))
                    except TransferFailedError as error:
                        # A payload died with a process that was through with this request: no stage failed on it, so it is
                        # done again, unless the client has seen a part of it.
                        if not error.lost or flight.delivered or number == _ATTEMPTS - 1:
                            raise
                        _log.warning("request %s starts again: %s", flight.request_id, error)
        except TimeoutError:
            within = " and ".join(repr(name) for name in self.pipeline.stages if name in flight.within)
            raise RequestTimeoutError(
                f"not done after {flight.timeout_s:g} s; it was in {within or 'no stage'}"
            ) from None

    async def _attempt(self, attempt: _Attempt) -> None:
        attempt.flight.edges.clear()
        attempt.flight.within.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                for name in self.pipeline.stages:
                    attempt.tasks[name] = tasks.create_task(self._stage(attempt, name))
                for edge in self.pipeline.outputs(REQUEST):
                    tasks.create_task(self._feed(attempt, edge))
                for edge in self.pipeline.inputs(RESPONSE):
                    tasks.create_task(self._collect(attempt, edge))
        except (ServeError, asyncio.CancelledError, BaseExceptionGroup) as error:
            self._discard(attempt.request_id)
            raise _first(error) from None

    async def _stage(self, attempt: _Attempt, name: str) -> None:
        edges = self.pipeline.inputs(name)
        inputs = {edge.producer: await attempt.announced[edge.producer, name] for edge in edges}
        attempt.flight.within.add(name)
        pool = self.pools[name]
        run = Run(
            request_id=attempt.request_id, params=attempt.flight.params, inputs=inputs, timeout_s=pool.stage.timeout_s
        )
        try:
            for done in await pool.submit(run, attempt.on_output).outcome:
                self._account(attempt.flight, done)
            attempt.flight.within.discard(name)
        except TransferFailedError as error:
            await self._hear(attempt, error.neighbour)
            raise

    async def _hear(self, attempt: _Attempt, stage: str) -> None:
        """Before a failed transfer counts, let the stage at its other end say whether it failed: that is then the story."""
        if stage in attempt.tasks:
            # Its failure cancels this task, so waiting is all there is to do.
            await asyncio.wait([attempt.tasks[stage]], timeout=_VERDICT_S)

    async def _feed(self, attempt: _Attempt, edge: EdgeSpec) -> None:
        sink = Sink(self._ends[edge.name], attempt.request_id, edge, attempt.flight.deadline)
        started = time.perf_counter()
        try:
            metadata = await self._in_thread(sink.put, attempt.flight.payload)
        except OmniConnectorError as error:
            raise _transfer_failed(REQUEST, error, edge.consumer) from error
        nbytes = metadata["nbytes"] if metadata else 0
        put_s = time.perf_counter() - started
        attempt.flight.edges.append(
            EdgeUse(producer=REQUEST, consumer=edge.consumer, puts=1, put_bytes=nbytes, put_s=put_s)
        )
        attempt.announced[edge.producer, edge.consumer].set_result(
            Announced(replica=0, stream=False, metadata=metadata)
        )

    async def _collect(self, attempt: _Attempt, edge: EdgeSpec) -> None:
        flight = attempt.flight
        announced = await attempt.announced[edge.producer, edge.consumer]
        source = Source(self._ends[edge.name], attempt.request_id, announced, edge.producer, flight.deadline)
        chunks = source.stream()
        waited_s = 0.0
        try:
            while True:
                started = time.perf_counter()
                chunk = await self._in_thread(next, chunks, chunks)
                waited_s += time.perf_counter() - started
                if chunk is chunks:
                    break
                if not flight.delivered:
                    flight.first_chunk_s = time.monotonic() - flight.started
                flight.delivered += 1
                await flight.chunks.put(chunk)
        except OmniConnectorError as error:
            await self._hear(attempt, edge.producer)
            raise _transfer_failed(RESPONSE, error, edge.producer) from error
        use = EdgeUse(
            producer=edge.producer, consumer=RESPONSE, gets=source.gets, wait_s=waited_s, streamed=announced.stream
        )
        flight.edges.append(use)

    def _account(self, flight: Flight, done: Done) -> None:
        flight.edges += done.edges
        flight.busy_s[done.origin.stage] = max(done.busy_s, flight.busy_s.get(done.origin.stage, 0.0))

    def _discard(self, request_id: str) -> None:
        for pool in self.pools.values():
            for group in pool.groups:
                group.abort(request_id)
        for end in self._ends.values():
            self._threads.submit(_cleanup, end, request_id)

    async def _in_thread(self, function: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _cleanup(end: OmniConnector, request_id: str) -> None:
    try:
        end.cleanup(request_id)
    except OmniConnectorError as error:
        _log.warning("request %s is not cleaned up: %s", request_id, error)


def _transfer_failed(end: str, error: OmniConnectorError, neighbour: str) -> TransferFailedError:
    cause = f"{error.code}: {error}"
    return TransferFailedError(end, cause, neighbour=neighbour, lost=isinstance(error, PeerLostError))


def _first(error: BaseException) -> BaseException:
    """Return the failure that came first in a task group: the others are its consequences."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""The HTTP door: ``POST /v1/generate``, ``GET /health``, ``GET /metrics``, ``GET /v1/stages``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from omni_connector_serve.runtime.errors import RequestError, ServeError
from omni_connector_serve.runtime.flight import Flight
from omni_connector_serve.runtime.media import join, media_bytes, render
from omni_connector_serve.runtime.metrics import exposition
from omni_connector_serve.runtime.orchestrator import Orchestrator

__all__ = ["build_app"]

_T = TypeVar("_T")


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of ``POST /v1/generate``; media are base64."""

    text: str = ""
    media: dict[str, str] = {}
    params: dict[str, Any] = {}
    stream: bool = False
    timeout_s: float | None = None


class TooLargeError(ServeError):
    """The body is larger than ``max_body_bytes``."""

    status = 413


class ClientGoneError(ServeError):
    """Nobody waits for the answer any more."""

    status = 499


class MediaTypeError(ServeError):
    """The body is neither JSON nor a form."""

    status = 415


def build_app(orchestrator: Orchestrator) -> FastAPI:
    """Make the ASGI application that serves a running pipeline."""
    app = FastAPI(title="omni-connector", description=f"Pipeline {orchestrator.pipeline.name!r}")

    @app.exception_handler(ServeError)
    async def refuse(request: Request, error: ServeError) -> JSONResponse:
        return JSONResponse({"error": error.describe()}, error.status)

    @app.exception_handler(HTTPException)
    async def refuse_http(request: Request, error: HTTPException) -> JSONResponse:
        described = {"type": "HTTPException", "message": str(error.detail)}
        return JSONResponse({"error": described}, error.status_code, headers=error.headers)

    @app.get("/health")
    async def health() -> JSONResponse:
        """Say whether every stage can work; if not, 503 and why."""
        reason = orchestrator.missing
        return JSONResponse(
            {"status": "unavailable", "reason": reason} if reason else {"status": "ok"}, 503 if reason else 200
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return counters of requests, stages and edges in Prometheus' format."""
        content, media_type = exposition(orchestrator, await orchestrator.stats())
        return Response(content, media_type=media_type)

    @app.get("/v1/stages")
    async def stages() -> dict[str, Any]:
        """Return each stage's state, processes, and the request that it has."""
        return {
            "pipeline": orchestrator.pipeline.name,
            "stages": [pool.describe() for pool in orchestrator.pools.values()],
            "edges": [{"edge": edge.name, "connector": edge.backend} for edge in orchestrator.pipeline.edges],
        }

    @app.post("/v1/generate")
    async def generate(request: Request) -> Response:
        """Take a request through the pipeline.

        As JSON: `text`, `media` (name to base64), `params`, `stream`, `timeout_s`. As a multipart form the same, with
        media as files and `params` as JSON text. With `stream`, the answer is a stream of server-sent events: `chunk`,
        then `done` or `error`.
        """
        payload, params, stream, timeout_s = await _read(request, orchestrator.pipeline.settings.max_body_bytes)
        flight = orchestrator.generate(payload, params, timeout_s)
        if stream:
            return await _streamed(flight, request)
        return await _whole(flight, request)

    return app


async def _whole(flight: Flight, request: Request) -> Response:
    try:
        outputs = join(await _while_wanted(_all(flight), request))
    finally:
        await flight.cancel()
    return JSONResponse({"request_id": flight.request_id, "outputs": render(outputs), **_summary(flight)})


async def _streamed(flight: Flight, request: Request) -> Response:
    chunks = aiter(flight)
    try:
        first = await _while_wanted(_some(chunks), request)  # an error before the first chunk has a status of its own
    except BaseException:
        await flight.cancel()
        raise

    async def events() -> AsyncIterator[str]:
        try:
            for chunk in first:
                yield _event("chunk", render(chunk))
            async for chunk in chunks:
                yield _event("chunk", render(chunk))
            yield _event("done", {"request_id": flight.request_id, **_summary(flight)})
        except ServeError as error:
            yield _event("error", error.describe())

    return _Events(flight, events())


class _Events(StreamingResponse):
    """Server-sent events, and with their end, however it comes, the end of the request."""

    def __init__(self, flight: Flight, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._flight = flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._flight.cancel()


async def _all(flight: Flight) -> list[Any]:
    return [chunk async for chunk in flight]


async def _some(chunks: AsyncIterator[Any]) -> list[Any]:
    """Return the first chunk, in a list that is empty when there is none."""
    async for chunk in chunks:
        return [chunk]
    return []


async def _while_wanted(work: Coroutine[Any, Any, _T], request: Request) -> _T:
    """Do something for as long as the client is there.

    Raises
    ------
    ClientGoneError
        It left.
    """
    gone = asyncio.create_task(_disconnected(request))
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((gone, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("the client left")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _summary(flight: Flight) -> dict[str, Any]:
    return {
        "first_chunk_s": flight.first_chunk_s,
        "total_s": flight.total_s,
        "chunks": flight.delivered,
        "stages": flight.busy_s,
        "edges": [msgspec.to_builtins(use) for use in flight.edges],
    }


def _event(name: str, value: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(value)}\n\n"


async def _read(request: Request, limit: int) -> tuple[dict[str, Any], dict[str, Any], bool, float | None]:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise TooLargeError(f"the body is larger than the {limit:,} bytes that are taken")
    if media_type == "application/json":
        parsed = _parse(bytes(body))
        media = {name: media_bytes(name, text) for name, text in parsed.media.items()}
    elif media_type == "multipart/form-data":
        parsed, media = await _form(request, bytes(body), limit)
    else:
        raise MediaTypeError(
            f"the content type is {media_type or 'missing'!r}; send application/json or multipart/form-data"
        )
    if parsed.timeout_s is not None and not 0 < parsed.timeout_s < float("inf"):
        raise RequestError(f"timeout_s is a number above 0, not {parsed.timeout_s}")
    return {"text": parsed.text, "media": media}, parsed.params, parsed.stream, parsed.timeout_s


def _parse(body: bytes) -> GenerateBody:
    try:
        return msgspec.json.decode(body, type=GenerateBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not a request: {error}") from error


async def _form(request: Request, body: bytes, limit: int) -> tuple[GenerateBody, dict[str, bytes]]:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    fields: dict[str, Any] = {}
    media: dict[str, bytes] = {}
    async with Request(request.scope, receive).form(max_part_size=limit) as form:
        for name, value in form.multi_items():
            if name in fields or name in media:
                raise RequestError(f"the form has {name!r} twice")
            if isinstance(value, UploadFile):
                media[name] = await value.read()
            else:
                fields[name] = value
    try:
        if "params" in fields:
            fields["params"] = msgspec.json.decode(fields["params"])
        return msgspec.convert(fields, GenerateBody, strict=False), media
    except msgspec.MsgspecError as error:
        raise RequestError(f"the form is not a request: {error}") from error

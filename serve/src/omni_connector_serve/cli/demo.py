"""``omni-connector demo``: the reference pipeline over a connector, one image and one text through it, and where the bytes went."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import importlib.resources
import json
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from omni_connector_core import plugin_manager
from omni_connector_serve.runtime.load import load_pipeline
from omni_connector_serve.runtime.media import join
from omni_connector_serve.runtime.pipeline import Pipeline
from omni_connector_serve.runtime.server import serving

if TYPE_CHECKING:
    from omni_connector_serve.reference.single import Generated

_FILES = importlib.resources.files("omni_connector_serve.reference")


@dataclasses.dataclass
class Answer:
    """What one request gave, and how it went."""

    summary: dict[str, Any]
    outputs: dict[str, Any]
    first_chunk_s: float
    total_s: float


def run(
    connector: str, *, image: Path | None, text: str, max_tokens: int, requests: int, output: Path, as_json: bool
) -> None:
    """Serve, ask, compare with a single process, save, and report."""
    logging.basicConfig(level=logging.WARNING)
    console = Console(stderr=as_json)
    picture = image.read_bytes() if image else (_FILES / "demo.png").read_bytes()
    with contextlib.ExitStack() as daemons:
        options: dict[str, Any] = {}
        start = plugin_manager.spec(connector).load_service()
        if start is not None:
            console.print(f"Starting the daemons of {connector} ...")
            options = daemons.enter_context(start()).config()
        with importlib.resources.as_file(_FILES / "pipeline.yaml") as path:
            pipeline = load_pipeline(path, connector=connector, options=options)
        pipeline = dataclasses.replace(pipeline, settings=msgspec.structs.replace(pipeline.settings, port=0))
        from omni_connector_serve.reference import single  # torch takes seconds, and a bad name should not

        console.print(f"Starting {len(pipeline.stages)} stages, each in a process of its own, over {connector} ...")
        body = {
            "text": text,
            "media": {"image": base64.b64encode(picture).decode()},
            "params": {"max_tokens": max_tokens},
            "stream": True,
        }
        answers = asyncio.run(_ask(pipeline, body, requests))
        # before the daemons stop: a vendor's client in this process may complain, every second, that they are gone
        expected = single.generate(picture, text, max_tokens=max_tokens)
    answer = answers[-1]
    matches = all(_matches(answer, expected) for answer in answers)
    output.mkdir(parents=True, exist_ok=True)
    files = {"wav": output / "sound.wav", "png": output / "picture.png"}
    files["wav"].write_bytes(answer.outputs["audio"]["data"])
    files["png"].write_bytes(answer.outputs["image"]["data"])
    report = {
        "connector": connector,
        "stages": list(pipeline.stages),
        "requests": len(answers),
        "matches_single_process": matches,
        "first_chunk_s": answer.first_chunk_s,
        "total_s": answer.total_s,
        "usage": answer.outputs["usage"],
        "edges": _edges(pipeline, answer),
        "files": {kind: str(path) for kind, path in files.items()},
    }
    if as_json:
        print(json.dumps(report))
    else:
        show(console, report)
    if not matches:
        raise SystemExit(1)


async def _ask(pipeline: Pipeline, body: dict[str, Any], requests: int) -> list[Answer]:
    async with serving(pipeline) as (orchestrator, url, _), httpx.AsyncClient(base_url=url, timeout=None) as client:
        await orchestrator.ready()
        return [await _answer(client, body) for _ in range(requests)]


async def _answer(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    started = time.perf_counter()
    first_chunk_s = 0.0
    chunks = []
    async with client.stream("POST", "/v1/generate", json=body) as response:
        if response.is_error:
            raise SystemExit(f"error: {(await response.aread()).decode()}")
        async for event, data in _events(response):
            if event == "chunk":
                first_chunk_s = first_chunk_s or time.perf_counter() - started
                chunks.append({name: _with_bytes(value) for name, value in data.items()})
            elif event == "done":
                return Answer(data, join(chunks), first_chunk_s, time.perf_counter() - started)
            else:
                raise SystemExit(f"error: {data['message']}")
    raise SystemExit("error: the server ended the stream before its end")


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    event = ""
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
        elif name == "data":
            yield event, json.loads(value)


def _with_bytes(value: Any) -> Any:
    return {**value, "data": base64.b64decode(value["data"])} if isinstance(value, dict) and "data" in value else value


def _matches(answer: Answer, expected: Generated) -> bool:
    tokens, samples, picture = expected.as_outputs()
    outputs = answer.outputs
    return (outputs["tokens"], outputs["audio"]["data"], outputs["image"]["data"]) == (tokens, samples, picture)


def _edges(pipeline: Pipeline, answer: Answer) -> list[dict[str, Any]]:
    """Bring both ends of each edge together."""
    ends: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for use in answer.summary["edges"]:
        ends[f"{use['producer']}->{use['consumer']}"].append(use)
    rows = []
    for edge in pipeline.edges:
        uses = ends[edge.name]
        streamed = any(use["streamed"] for use in uses)
        put_s, wait_s, get_s = (sum(use[time_s] for use in uses) for time_s in ("put_s", "wait_s", "get_s"))
        rows.append(
            {
                "edge": edge.name,
                "connector": edge.backend,
                "streamed": streamed,
                "payloads": sum(use["puts"] for use in uses),
                "bytes": sum(use["put_bytes"] for use in uses),
                "put_s": put_s,
                "wait_s": wait_s,
                "get_s": get_s,
                "share": (put_s + get_s + (0.0 if streamed else wait_s)) / answer.total_s,
            }
        )
    return rows


def show(console: Console, report: dict[str, Any]) -> None:
    """Print a report, which is what ``--json`` prints, for people."""
    table = Table(box=SIMPLE_HEAD, title=f"The last of {report['requests']} requests, over {report['connector']}")
    for column in ("edge", "payloads", "bytes", "put ms", "wait ms", "get ms", "share"):
        table.add_column(column, justify="left" if column == "edge" else "right", no_wrap=True)
    for row in report["edges"]:
        wait = f"{row['wait_s'] * 1e3:.2f}{'*' if row['streamed'] else ''}"
        put, get = f"{row['put_s'] * 1e3:.2f}", f"{row['get_s'] * 1e3:.2f}"
        table.add_row(row["edge"], str(row["payloads"]), f"{row['bytes']:,}", put, wait, get, f"{row['share']:.2%}")
    console.print(table)
    console.print("share: of the request's time. *: a stream; its wait is the producer at work, and not counted")
    usage = report["usage"]
    console.print(
        f"Prefill computed {usage['prompt_positions']} positions once; decode continued from their KV cache and computed "
        f"{usage['decode_positions']} more."
    )
    console.print(
        f"First chunk of sound after {report['first_chunk_s']:.3f} s, all of it after {report['total_s']:.3f} s."
    )
    same = "[green]equal, bit for bit[/]" if report["matches_single_process"] else "[red]DIFFERENT[/]"
    console.print(f"Compared with one process that caches nothing: {same}.")
    console.print(f"Saved {report['files']['wav']} and {report['files']['png']}.")
    console.print(
        "\nNext: omni-connector backends                     what else is installed\n"
        "      make demo CONNECTOR=NAME                    the same over another one\n"
        "      omni-connector serve PIPELINE.yaml          your own stages, see docs/serving.md"
    )

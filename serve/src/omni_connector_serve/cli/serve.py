"""``omni-connector serve``."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path

import msgspec

from omni_connector_serve.runtime.load import load_pipeline
from omni_connector_serve.runtime.server import run_server


def run(path: Path, *, host: str | None, port: int | None, connector: str | None) -> None:
    """Serve the pipeline at `path` until a signal."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s serve %(levelname)s %(message)s")
    pipeline = load_pipeline(path, connector=connector)
    given = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    settings = msgspec.structs.replace(pipeline.settings, **given)
    asyncio.run(run_server(dataclasses.replace(pipeline, settings=settings)))

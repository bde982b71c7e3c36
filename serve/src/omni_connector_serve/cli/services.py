"""``omni-connector services``."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Sequence

import typer
import yaml

from omni_connector_core import plugin_manager
from omni_connector_core.services import ServiceError, start_with

_LOOK_S = 1.0


def run(name: str, settings: Sequence[str], *, as_json: bool) -> None:
    """Run the daemons of a backend until SIGINT or SIGTERM."""
    start = plugin_manager.spec(name).load_service()
    if start is None:
        typer.echo(f"{name} needs no service")
        return
    # Before the daemons start, so that a signal at any moment ends in an orderly stop.
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with start_with(start, settings) as service:
        if as_json:
            typer.echo(json.dumps(service.describe()))
        else:
            definition = {"connectors": {name: {"name": name, "extra": service.config()}}}
            typer.echo(f"# {name} is up. Paste this into the pipeline file; Ctrl-C stops it.")
            typer.echo(yaml.safe_dump(definition, sort_keys=False))
        while not stop.wait(_LOOK_S):
            for daemon in service.daemons.values():
                if not daemon.running:
                    raise ServiceError(f"{daemon.spec.name} ended; the end of its log:\n{daemon.tail()}")

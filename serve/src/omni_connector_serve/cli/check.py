"""``omni-connector check``."""

from __future__ import annotations

from pathlib import Path

import typer

from omni_connector_serve.runtime.load import pipeline_faults


def run(files: list[Path]) -> None:
    """Print every fault of every file, one a line."""
    found = False
    for path in files:
        for fault in pipeline_faults(path):
            found = True
            typer.echo(" ".join(str(fault).split()))
    if found:
        raise typer.Exit(1)
    typer.echo(f"{', '.join(map(str, files))}: ok")

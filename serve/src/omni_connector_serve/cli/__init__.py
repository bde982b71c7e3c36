"""The command ``omni-connector``. Each command imports what it needs when it runs, so that none pays for the others."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app", "main"]

app = typer.Typer(
    help="Carry what one stage of an omni-modal pipeline makes to the next.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
services = typer.Typer(help="The daemons that some backends need.", no_args_is_help=True)
app.add_typer(services, name="services")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def serve(
    pipeline: Annotated[Path, typer.Argument(help="The pipeline file (YAML).", metavar="PIPELINE.yaml")],
    host: Annotated[str | None, typer.Option(help="Listen here instead of the file's serve.host.")] = None,
    port: Annotated[
        int | None, typer.Option(help="Listen here instead of the file's serve.port; 0: a free one.")
    ] = None,
    connector: Annotated[str | None, typer.Option(help="Use this backend on every edge instead of the file's.")] = None,
) -> None:
    """Serve a pipeline over HTTP, each stage in a process of its own."""
    from omni_connector_serve.cli.serve import run

    run(pipeline, host=host, port=port, connector=connector)


@app.command()
def demo(
    connector: Annotated[str, typer.Option(help="The backend on every edge.")] = "shared_memory",
    image: Annotated[
        Path | None, typer.Option(help="An image file, instead of the package's own.", exists=True, dir_okay=False)
    ] = None,
    text: Annotated[str, typer.Option(help="What to say about it.")] = "What does this picture sound like?",
    max_tokens: Annotated[int, typer.Option(help="Length of the sound, in tokens of 20 ms.")] = 96,
    requests: Annotated[int, typer.Option(min=1, help="How many to send in turn; the first one opens pools.")] = 3,
    output: Annotated[Path, typer.Option(help="Where the WAV and the PNG go.")] = Path("demo-output"),
    json: Json = False,
) -> None:
    """Serve the reference pipeline, send a request, and show where its bytes went."""
    try:
        from omni_connector_serve.cli.demo import run
    except ImportError as error:
        print(f"error: {error}: pip install 'omni-connector-serve[reference]'", file=sys.stderr)
        raise typer.Exit(1) from error

    run(connector, image=image, text=text, max_tokens=max_tokens, requests=requests, output=output, as_json=json)


@app.command()
def backends(json: Json = False) -> None:
    """List the installed backends and what they can do."""
    from omni_connector_serve.cli.backends import run

    run(as_json=json)


@app.command()
def check(
    files: Annotated[
        list[Path], typer.Argument(help="Pipeline files, or deploy files of vLLM-Omni.", metavar="FILE...")
    ],
) -> None:
    """Check files before anything is started: one line per fault, and exit status 1 if there is any."""
    from omni_connector_serve.cli.check import run

    run(files)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="The backend's name, such as my_backend.")],
    folder: Annotated[Path | None, typer.Option(help="Where to write it; by default omni-connector-NAME.")] = None,
) -> None:
    """Write a backend package that passes the first level of the contract suite, to fill in."""
    from omni_connector_serve.cli.new import run

    run(name, folder)


@services.command()
def up(
    name: Annotated[str, typer.Argument(help="The backend.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of the service, as mode=shared.")
    ] = None,
    json: Json = False,
) -> None:
    """Start a backend's daemons, print the config that reaches them, and stop them on Ctrl-C."""
    from omni_connector_serve.cli.services import run

    run(name, settings or (), as_json=json)


def main() -> None:
    """Run the command; a failure that we know is a line on stderr and exit status 1."""
    from omni_connector_core import OmniConnectorError
    from omni_connector_core.services import ServiceError

    if os.getcwd() not in sys.path:  # as for the workers, which `python -m` starts: a stage may lie in this folder
        sys.path.insert(0, os.getcwd())
    try:
        app()
    except (OmniConnectorError, ServiceError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)

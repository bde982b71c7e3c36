"""``omni-connector new``."""

from __future__ import annotations

from pathlib import Path

import typer

from omni_connector_core import ConfigError, PluginError


def run(name: str, folder: Path | None) -> None:
    """Write a backend package and say what to do with it."""
    try:
        from omni_connector_contract_tests.scaffold import write_package
    except ImportError as error:
        raise PluginError(str(error), hint="pip install omni-connector-contract-tests") from error
    folder = folder or Path(f"omni-connector-{name.replace('_', '-')}")
    try:
        written = write_package(name, folder)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    for path in written:
        typer.echo(path)
    typer.echo(
        f"\nNext: pip install -e {folder}\n      pytest --pyargs omni_connector_contract_tests --connector {name}"
    )

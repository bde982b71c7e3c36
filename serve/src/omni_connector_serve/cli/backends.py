"""``omni-connector backends``."""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import entry_points
from typing import Any

from rich.console import Console
from rich.table import Table

from omni_connector_core import OmniConnectorError, plugin_manager
from omni_connector_core.native import native


def run(*, as_json: bool) -> None:
    """Print what is installed; imports no backend's transport and no SDK."""
    rows = [_describe(name) for name in plugin_manager.names()]
    if as_json:
        print(json.dumps({"codec": _codec(), "backends": rows}))
        return
    table = Table(title="Installed backends", caption=f"The codec is {_codec()}")
    for column in ("backend", "version", "SDK", "capabilities", ""):
        table.add_column(column)
    for row in rows:
        if "error" in row:
            table.add_row(row["name"], row["version"], "", "", f"[red]{row['error']}")
            continue
        sdk = (
            "none needed"
            if row["sdk"] is None
            else row["sdk"]
            if row["sdk_present"]
            else f"[red]missing: {row['install']}"
        )
        claimed = ", ".join(name for name, value in row["capabilities"].items() if value)
        table.add_row(row["name"], row["version"], sdk, claimed, row["summary"])
    Console().print(table)


def _codec() -> str:
    return "python" if native is None else "compiled"


def _describe(name: str) -> dict[str, Any]:
    versions = {point.dist.version for point in entry_points(group="omni_connector", name=name) if point.dist}
    row: dict[str, Any] = {"name": name, "version": ", ".join(sorted(versions))}
    try:
        spec = plugin_manager.spec(name)
    except OmniConnectorError as error:
        return {**row, "error": str(error)}
    return {
        **row,
        "summary": spec.summary,
        "capabilities": dataclasses.asdict(spec.capabilities),
        "sdk": spec.sdk,
        "sdk_present": spec.sdk_present(),
        "install": spec.install,
        "service": spec.service is not None,
    }

"""A stage's process as a runtime starts it: its connectors opened from a deploy file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omni_connector_contract_tests.harness.payloads import build, fingerprint
from omni_connector_contract_tests.harness.worker import Acting
from omni_connector_core import OmniConnector, Role
from omni_connector_core.config import load, open_ends

__all__ = ["close_stage", "get_at_stage", "open_stage", "options_at_stage", "put_at_stage"]


def open_stage(acting: Acting, path: Path, stage: str, **arguments: Any) -> dict[str, tuple[str, str]]:
    """Open every end that a stage has and keep them; returns role and backend by edge."""
    opened = open_ends(load(path), stage, **arguments)
    acting.kept["stage"] = opened
    return {str(edge): (connector.role.value, connector.backend) for edge, connector in opened.items()}


def put_at_stage(acting: Acting, key: Any, payload: Any) -> dict[str, Any]:
    """Put into every edge that leaves the stage; returns the metadata by edge."""
    return {str(end.edge): end.put(key, build(payload)) for end in _ends(acting, Role.PRODUCER)}


def get_at_stage(acting: Acting, key: Any) -> dict[str, str]:
    """Get from every edge that comes in; returns the fingerprints by edge."""
    return {str(end.edge): fingerprint(end.get(key)) for end in _ends(acting, Role.CONSUMER)}


def options_at_stage(acting: Acting, name: str) -> set[Any]:
    """Return the values that an option has at the stage's ends."""
    return {getattr(end.transport.options, name) for end in acting.kept["stage"].values()}


def close_stage(acting: Acting) -> None:
    """Close what `open_stage` opened."""
    for end in acting.kept.pop("stage", {}).values():
        end.close()


def _ends(acting: Acting, role: Role) -> list[OmniConnector]:
    return [end for end in acting.kept["stage"].values() if end.role is role]

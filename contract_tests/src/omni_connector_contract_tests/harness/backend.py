"""The backend under test: its name, its options, and what it claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omni_connector_core import BackendSpec, Capabilities, plugin_manager

__all__ = ["Backend", "read_config"]


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend under test.

    Parameters
    ----------
    name
        The name under which it is installed.
    config
        Its own options, as a user would write them.
    spec
        What its plugin would say, for a backend that no entry point names.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    spec: BackendSpec | None = None

    def describe(self) -> BackendSpec:
        """Return the plugin's description; in every process, a `spec` given by hand is registered first."""
        if self.spec is not None:
            plugin_manager.register(self.spec)
        return plugin_manager.spec(self.name)

    @property
    def capabilities(self) -> Capabilities:
        """What the plugin claims."""
        return self.describe().capabilities


def read_config(path: Path) -> dict[str, Any]:
    """Read a backend's options from a YAML or JSON file."""
    import yaml

    loaded = yaml.safe_load(path.read_text())
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds no mapping of options")
    return loaded

"""The backend under test: its name, its options, and what it claims."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omni_connector_core import BackendSpec, Capabilities, plugin_manager
from omni_connector_core.services import ServiceError, start_with

__all__ = ["Backend", "read_config", "running"]


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

    @property
    def folders(self) -> list[Path]:
        """The folders that its options name, existing or not, but for those that everybody may write to (/dev/shm)."""
        named = [Path(value) for value in self.config.values() if isinstance(value, str) and Path(value).is_absolute()]
        return [path for path in named if not (path.exists() and path.stat().st_mode & stat.S_ISVTX)]


@contextmanager
def running(
    name: str,
    config: Mapping[str, Any] | None = None,
    *,
    service: bool | None = None,
    settings: Sequence[str] = (),
) -> Iterator[Backend]:
    """Yield an installed backend, its daemons running for as long.

    Parameters
    ----------
    config
        Its options, on top of those by which it finds its daemons.
    service
        Whether to start the daemons that its plugin names; None: if it names any, and no config is given.
    settings
        For its daemons, ``name=value`` each.

    Raises
    ------
    ServiceError
        The daemons do not start, or the plugin names none.
    """
    spec = plugin_manager.spec(name)
    start = spec.load_service()
    if start is None and (service or settings):
        raise ServiceError(f"the plugin of {name} names no service to start")
    if start is None or service is False or (service is None and config is not None and not settings):
        yield Backend(name, config or {}, spec)
        return
    with start_with(start, settings) as daemons:
        yield Backend(name, {**daemons.config(), **(config or {})}, spec)


def read_config(path: Path) -> dict[str, Any]:
    """Read a backend's options from a YAML or JSON file."""
    import yaml

    loaded = yaml.safe_load(path.read_text())
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds no mapping of options")
    return loaded

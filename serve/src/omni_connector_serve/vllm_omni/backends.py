# SPDX-License-Identifier: Apache-2.0
"""Which connector names this adapter answers to."""

from __future__ import annotations

import os

from omni_connector_core import BackendSpec, ConfigError, plugin_manager
from omni_connector_serve.vllm_omni.extra import upstream_options

__all__ = ["DROP_IN_ENV", "backend_of", "drop_in_names", "our_names"]

DROP_IN_ENV = "OMNI_CONNECTOR_DROP_IN"
"""``1``: stand in for every built-in connector that an installed backend can stand in for; or their names, with commas."""


def our_names() -> frozenset[str]:
    """Every name that a deploy file may use for a backend of ours. Imports no SDK, and without drop-in no plugin."""
    return frozenset(plugin_manager.names()) | frozenset(drop_in_names())


def drop_in_names() -> dict[str, str]:
    """The built-in connectors' names that backends of ours stand in for, each with the backend's name."""
    wanted = os.environ.get(DROP_IN_ENV, "")
    if wanted.lower() in ("", "0", "false", "no"):
        return {}
    stand_ins: dict[str, str] = {}
    for backend in plugin_manager.names():
        drop_in = plugin_manager.spec(backend).drop_in
        if drop_in is not None:
            stand_ins[drop_in.name] = backend
    for alias, name in upstream_options().aliases.items():
        if name in stand_ins:
            stand_ins[alias] = stand_ins[name]
    if wanted.lower() in ("1", "true", "yes", "all"):
        return stand_ins
    chosen = [name.strip() for name in wanted.split(",")]
    if unknown := [name for name in chosen if name not in stand_ins]:
        raise ConfigError(
            f"{DROP_IN_ENV} names {', '.join(unknown)}, for which no installed backend can stand in",
            hint=f"Installed backends can stand in for: {', '.join(sorted(stand_ins)) or 'none'}",
        )
    return {name: stand_ins[name] for name in chosen}


def backend_of(name: str) -> BackendSpec:
    """The backend behind a connector name, ours or a built-in one's.

    Raises
    ------
    UnknownBackendError, PluginError
    """
    return plugin_manager.spec(drop_in_names().get(name, name))

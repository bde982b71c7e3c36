# SPDX-License-Identifier: Apache-2.0
"""The connectors of this process: one for each end of an edge, however many instances the engine makes, and closed at its exit."""

from __future__ import annotations

import atexit
import multiprocessing.util
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omni_connector_core import Edge, OmniConnector, Role, create_connector
from omni_connector_serve.vllm_omni.place import Place
from omni_connector_serve.vllm_omni.report import StatsReport

__all__ = ["End", "acquire", "close_all", "release"]


@dataclass(frozen=True)
class End:
    """Names one end of an edge in this process, with everything that makes it what it is."""

    backend: str
    edge: Edge
    role: Role
    place: Place
    options: Mapping[str, Any] = field(hash=False)


@dataclass
class _Shared:
    connector: OmniConnector
    users: int = 1


_open: dict[End, _Shared] = {}
_lock = threading.Lock()
_report = StatsReport(lambda: _connectors())
_hooked = False


def acquire(end: End) -> OmniConnector:
    """Open a connector, or join in one that is open. Its last user closes it."""
    with _lock:
        _close_at_exit()
        if (shared := _open.get(end)) is not None:
            shared.users += 1
            return shared.connector
        connector = create_connector(
            end.backend, end.options, edge=end.edge, role=end.role, replica=end.place.replica, rank=end.place.rank
        )
        _open[end] = _Shared(connector)
    _report.start()
    return connector


def release(end: End) -> None:
    """Leave a connector; one that was closed at exit is left already."""
    with _lock:
        shared = _open.get(end)
        if shared is None:
            return
        shared.users -= 1
        if shared.users:
            return
        del _open[end]
        last = not _open
    _close([shared.connector], last)


def close_all() -> None:
    """Close every connector of the process; the engine does not close what it made for a worker that is told to go."""
    with _lock:
        connectors = [shared.connector for shared in _open.values()]
        _open.clear()
    _close(connectors, True)


def _close(connectors: list[OmniConnector], last: bool) -> None:
    if last:
        _report.stop()
    _report.now(connectors)
    for connector in connectors:
        connector.close()


def _connectors() -> list[OmniConnector]:
    with _lock:
        return [shared.connector for shared in _open.values()]


def _close_at_exit() -> None:
    """Hook in once. The engine's processes are multiprocessing's, which run their own finalizers and not atexit's."""
    global _hooked
    if not _hooked:
        _hooked = True
        atexit.register(close_all)
        multiprocessing.util.Finalize(None, close_all, exitpriority=100)

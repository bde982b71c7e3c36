# SPDX-License-Identifier: Apache-2.0
"""What the operator reads: one line for each thing that went wrong, and counters now and then."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from omni_connector_core import Edge, OmniConnector

__all__ = ["STATS_INTERVAL_ENV", "Once", "StatsReport", "logger"]

STATS_INTERVAL_ENV = "OMNI_CONNECTOR_STATS_INTERVAL_S"
"""Seconds between two lines of counters; without it a minute."""

_COUNTERS = ("puts", "gets", "put_bytes", "get_bytes", "pending", "bytes_held", "expired")
_REMEMBERED = 4096

# Below vLLM's logger, whose level and format are the operator's choice.
logger = logging.getLogger("vllm.omni_connector")


class Once:
    """Lets through what was not there lately, so that a loop of a thousand polls a second logs one line."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._lock = threading.Lock()

    def first(self, *what: object) -> bool:
        """Whether this is the first time."""
        with self._lock:
            new = what not in self._seen
            self._seen[what] = None
            self._seen.move_to_end(what)
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
        return new


class StatsReport:
    """Logs each connector's counters that have changed, once an interval, from a thread of its own, and at the end.

    Parameters
    ----------
    connectors
        Tells the connectors that are open.
    """

    def __init__(self, connectors: Callable[[], Iterable[OmniConnector]]) -> None:
        self._connectors = connectors
        self._last: dict[tuple[str, Edge, str], str] = {}
        self._lock = threading.Lock()
        self._stopped: threading.Event | None = None

    def start(self) -> None:
        """Report from now on; harmless when it does already."""
        with self._lock:
            if self._stopped is None:
                self._stopped = threading.Event()
                threading.Thread(
                    target=self._run, args=(self._stopped,), name="omni-connector-stats", daemon=True
                ).start()

    def stop(self) -> None:
        """Report no more."""
        with self._lock:
            if self._stopped is not None:
                self._stopped.set()
                self._stopped = None

    def _run(self, stopped: threading.Event) -> None:
        interval_s = float(os.environ.get(STATS_INTERVAL_ENV, 60.0))
        while not stopped.wait(interval_s):
            self.now(self._connectors())

    def now(self, connectors: Iterable[OmniConnector]) -> None:
        """Report what has changed."""
        for connector in connectors:
            stats = connector.stats()
            counters = " ".join(f"{name}={stats[name]}" for name in _COUNTERS)
            if stats["failures"]:
                counters += " " + " ".join(f"{name}={count}" for name, count in stats["failures"].items())
            who = (connector.backend, connector.edge, connector.role.value)
            with self._lock:
                if self._last.get(who) == counters:
                    continue
                self._last[who] = counters
            logger.info("connector stats: pid=%d backend=%s edge=%s role=%s %s", os.getpid(), *who, counters)

# SPDX-License-Identifier: Apache-2.0
"""What the operator reads: one line for each thing that went wrong, and counters now and then."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

from omni_connector_core import Edge, OmniConnector

__all__ = ["STATS_INTERVAL_ENV", "Once", "StatsReport", "logger"]

STATS_INTERVAL_ENV = "OMNI_CONNECTOR_STATS_INTERVAL_S"
"""Seconds between two lines of counters; 0: a line on every call after which a counter has changed."""

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
    """Logs each connector's counters when they have changed, at most once an interval, and at the end."""

    def __init__(self) -> None:
        self._interval_s = float(os.environ.get(STATS_INTERVAL_ENV) or 60.0)
        self._next_s = 0.0
        self._last: dict[tuple[str, Edge, str], str] = {}
        self._lock = threading.Lock()

    def tick(self, connectors: Iterable[OmniConnector]) -> None:
        """Report if it is time."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            self.now(connectors)

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
            logger.info("connector stats: backend=%s edge=%s role=%s %s", *who, counters)

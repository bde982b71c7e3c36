"""Counters of a server in Prometheus' format, made from its state when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from omni_connector_serve.runtime.orchestrator import Orchestrator

__all__ = ["exposition"]

_EDGE_COUNTERS = {
    "puts": ("payloads put", "puts"),
    "gets": ("payloads got", "gets"),
    "put_bytes": ("bytes put", "put_bytes"),
    "get_bytes": ("bytes got", "get_bytes"),
}


def exposition(orchestrator: Orchestrator) -> tuple[bytes, str]:
    """Return the text and its media type."""
    registry = CollectorRegistry()
    registry.register(_State(orchestrator))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _State(Collector):
    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    def collect(self) -> Iterator[Metric]:
        orchestrator = self._orchestrator
        requests = CounterMetricFamily("omni_serve_requests", "requests that ended, by outcome", labels=["outcome"])
        for outcome, count in orchestrator.outcomes.items():
            requests.add_metric([outcome], count)
        yield requests
        yield GaugeMetricFamily("omni_serve_requests_running", "requests under way", value=len(orchestrator.flights))
        ready = GaugeMetricFamily("omni_serve_stage_ready", "whether a replica can work", labels=["stage", "replica"])
        restarts = CounterMetricFamily(
            "omni_serve_stage_restarts", "restarts of a replica", labels=["stage", "replica"]
        )
        waiting = GaugeMetricFamily("omni_serve_stage_waiting", "requests in line for a stage", labels=["stage"])
        for name, pool in orchestrator.pools.items():
            waiting.add_metric([name], pool.describe()["waiting"])
            for group in pool.groups:
                ready.add_metric([name, str(group.replica)], group.state == "ready")
                restarts.add_metric([name, str(group.replica)], max(0, group.starts - 1))
        yield from (ready, restarts, waiting)
        rows = orchestrator.stats()
        labels = ["edge", "backend", "stage", "replica", "rank"]
        for suffix, (help_text, key) in _EDGE_COUNTERS.items():
            family = CounterMetricFamily(f"omni_connector_{suffix}", help_text, labels=labels)
            for row in rows:
                family.add_metric([str(row[label]) for label in labels], row[key])
            yield family
        for operation in ("put", "get"):
            family = CounterMetricFamily(f"omni_connector_{operation}_seconds", f"time in {operation}", labels=labels)
            for row in rows:
                family.add_metric([str(row[label]) for label in labels], row[f"{operation}_time"]["sum_s"])
            yield family

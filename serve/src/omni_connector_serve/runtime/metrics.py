"""Counters of a server in Prometheus' format, made from its state when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omni_connector_core.metrics import prometheus_families

if TYPE_CHECKING:
    from omni_connector_serve.runtime.orchestrator import Orchestrator

__all__ = ["exposition"]


def exposition(orchestrator: Orchestrator, connectors: list[dict[str, Any]]) -> tuple[bytes, str]:
    """Return the text, which includes the counters of `connectors`, and its media type."""
    registry = CollectorRegistry()
    registry.register(_State(orchestrator, connectors))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _State(Collector):
    def __init__(self, orchestrator: Orchestrator, connectors: list[dict[str, Any]]) -> None:
        self._orchestrator = orchestrator
        self._connectors = connectors

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
            waiting.add_metric([name], pool.waiting)
            for group in pool.groups:
                ready.add_metric([name, str(group.replica)], group.state == "ready")
                restarts.add_metric([name, str(group.replica)], group.restarts)
        yield from (ready, restarts, waiting)
        yield from prometheus_families(self._connectors)

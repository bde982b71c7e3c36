"""Counters of one connector, as a dict and, when prometheus-client is installed, as its metrics.

To record a transfer is to append to a queue, under 2 us (held by a test); what is in it is counted when somebody reads the counters,
or when there is much of it.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omni_connector_core.capabilities import Usage
from omni_connector_core.errors import PluginError

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

__all__ = ["BUCKETS_S", "Histogram", "Metrics", "export_prometheus", "prometheus_families"]

BUCKETS_S = (10e-6, 30e-6, 100e-6, 300e-6, 1e-3, 3e-3, 10e-3, 30e-3, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the time histograms, seconds."""

MUCH = 256
"""So many transfers are counted at once, by one of those who record them."""

_alive: weakref.WeakSet[Metrics] = weakref.WeakSet()


class Histogram:
    """Counts of durations by upper bound, seconds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def as_dict(self) -> dict[str, Any]:
        """Return count, sum and the counts per bucket (not cumulative; the last has no upper bound)."""
        return {
            "count": sum(self.counts),
            "sum_s": self.sum_s,
            "buckets_s": list(BUCKETS_S),
            "counts": list(self.counts),
        }


class Metrics:
    """What one connector did so far.

    Parameters
    ----------
    usage
        Asked, when the metrics are read, for what the transport holds.
    labels
        Name the connector among others: backend, edge, replica, rank.
    """

    def __init__(self, usage: Callable[[], Usage], **labels: str) -> None:
        self.labels = labels
        self._usage = usage
        self._lock = threading.Lock()
        self._new_puts: deque[tuple[int, float]] = deque()
        self._new_gets: deque[tuple[int, float, float]] = deque()
        self._puts, self._gets = 0, 0
        self._put_nbytes, self._get_nbytes = 0, 0
        self._put_time, self._get_time, self._wait_time = Histogram(), Histogram(), Histogram()
        self._credit_time = Histogram()
        self._failures: dict[tuple[str, str], int] = {}
        _alive.add(self)

    def put(self, nbytes: int, seconds: float) -> None:
        """Count a put that succeeded."""
        self._new_puts.append((nbytes, seconds))
        if len(self._new_puts) >= MUCH:
            self._count()

    def get(self, nbytes: int, wait_s: float, decode_s: float) -> None:
        """Count a get that succeeded: the time until the frame was here, and the time to decode it."""
        self._new_gets.append((nbytes, wait_s, decode_s))
        if len(self._new_gets) >= MUCH:
            self._count()

    def _count(self) -> None:
        with self._lock:
            for _ in range(len(self._new_puts)):
                nbytes, seconds = self._new_puts.popleft()
                self._puts += 1
                self._put_nbytes += nbytes
                self._put_time.add(seconds)
            for _ in range(len(self._new_gets)):
                nbytes, wait_s, decode_s = self._new_gets.popleft()
                self._gets += 1
                self._get_nbytes += nbytes
                self._wait_time.add(wait_s)
                self._get_time.add(decode_s)

    def credit(self, seconds: float) -> None:
        """Count a stream's writer that had to wait for its reader."""
        with self._lock:
            self._credit_time.add(seconds)

    def failed(self, operation: str, code: str) -> None:
        """Count a failure of an operation by the error's code."""
        with self._lock:
            self._failures[operation, code] = self._failures.get((operation, code), 0) + 1

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data.

        ``put_time`` is the whole put; ``wait_time`` is a get's time until the frame is in this process, waiting for the
        producer included; ``get_time`` is the rest of the get; ``credit_time`` is how long writers of streams waited for
        their readers.
        """
        usage = self._usage()
        self._count()
        with self._lock:
            return {
                **self.labels,
                "puts": self._puts,
                "gets": self._gets,
                "put_bytes": self._put_nbytes,
                "get_bytes": self._get_nbytes,
                "put_time": self._put_time.as_dict(),
                "wait_time": self._wait_time.as_dict(),
                "get_time": self._get_time.as_dict(),
                "credit_time": self._credit_time.as_dict(),
                "failures": {f"{operation}:{code}": n for (operation, code), n in self._failures.items()},
                "pending": usage.pending,
                "oldest_age_s": usage.oldest_age_s,
                "bytes_held": usage.bytes_held,
                "capacity_bytes": usage.capacity_bytes,
                "expired": usage.expired,
            }


def prometheus_families(every: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Turn what `Metrics.as_dict` returned, here or in other processes, into prometheus-client's metric families.

    Parameters
    ----------
    every
        One mapping a connector. Whatever in them is a str is a label, so callers may add their own.
    """
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    names = sorted({name for stats in every for name, value in stats.items() if isinstance(value, str)})

    def labels(stats: Mapping[str, Any], *more: str) -> list[str]:
        return [str(stats.get(name, "")) for name in names] + list(more)

    counters = {"puts": "puts", "gets": "gets", "put_bytes": "bytes put", "get_bytes": "bytes got"}
    counters["expired"] = "payloads that expired unread"
    for field, text in counters.items():
        family = CounterMetricFamily(f"omni_connector_{field}", f"Number of {text}", labels=names)
        for stats in every:
            family.add_metric(labels(stats), stats[field])
        yield family
    failures = CounterMetricFamily(
        "omni_connector_failures", "Failed operations by error", labels=[*names, "operation", "error"]
    )
    for stats in every:
        for failure, count in stats["failures"].items():
            failures.add_metric(labels(stats, *failure.split(":")), count)
    yield failures
    gauges = {
        "pending": "Payloads not yet read",
        "oldest_age_s": "Age of the oldest unread payload, seconds",
        "bytes_held": "Bytes of transport memory in use",
    }
    for field, text in gauges.items():
        gauge = GaugeMetricFamily(f"omni_connector_{field}", text, labels=names)
        for stats in every:
            gauge.add_metric(labels(stats), stats[field])
        yield gauge
    for field in ("put_time", "wait_time", "get_time", "credit_time"):
        times = HistogramMetricFamily(f"omni_connector_{field}_s", "Seconds per operation", labels=names)
        for stats in every:
            total, buckets = 0, []
            for bound, count in zip([*map(str, BUCKETS_S), "+Inf"], stats[field]["counts"], strict=True):
                total += count
                buckets.append((bound, total))
            times.add_metric(labels(stats), buckets, stats[field]["sum_s"])
        yield times


class _Collector:
    """Reads every living connector's counters when Prometheus asks."""

    def collect(self) -> Iterator[Any]:
        return prometheus_families([metrics.as_dict() for metrics in list(_alive)])


_collector = _Collector()
_registries: weakref.WeakSet[Any] = weakref.WeakSet()


def export_prometheus(registry: CollectorRegistry | None = None) -> None:
    """Publish the counters of every connector in this process; idempotent, and free until Prometheus asks.

    Parameters
    ----------
    registry
        A prometheus-client registry; default: its global one.

    Raises
    ------
    PluginError
        prometheus-client is not installed.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise PluginError(
            "prometheus-client is not installed", hint="pip install 'omni-connector-core[metrics]'"
        ) from error
    registry = prometheus_client.REGISTRY if registry is None else registry
    if registry not in _registries:
        _registries.add(registry)
        registry.register(_collector)

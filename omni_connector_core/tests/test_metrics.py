"""Counters: what is counted, what that costs, and how Prometheus sees it."""

from __future__ import annotations

import gc
import threading
import time
import uuid

import pytest

from omni_connector_core import Usage, create_connector
from omni_connector_core.metrics import BUCKETS_S, Histogram, Metrics, export_prometheus


def test_counting_a_transfer_costs_less_than_two_microseconds():
    metrics = Metrics(Usage, backend="test")
    count = 20_000

    def round_s():
        start_s = time.thread_time()
        for _ in range(count):
            metrics.put(1000, 1e-4)
            metrics.get(1000, 1e-5, 1e-5)
        return (time.thread_time() - start_s) / count

    assert min(round_s() for _ in range(5)) / 2 < 2e-6


def test_counts_of_many_threads_add_up():
    metrics = Metrics(Usage, backend="test")

    def work():
        for _ in range(2000):
            metrics.put(3, 1e-3)
            metrics.failed("get", "TransferTimeoutError")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = metrics.as_dict()
    assert stats["puts"] == 8000
    assert stats["put_bytes"] == 24_000
    assert stats["failures"] == {"get:TransferTimeoutError": 8000}
    assert stats["put_time"]["count"] == 8000


def test_a_histogram_puts_each_duration_under_its_bound():
    histogram = Histogram()
    for seconds in (0.0, BUCKETS_S[0], BUCKETS_S[0] * 1.01, 1e9):
        histogram.add(seconds)
    found = histogram.as_dict()
    assert found["counts"][:2] == [2, 1]
    assert found["counts"][-1] == 1
    assert found["count"] == 4
    assert len(found["counts"]) == len(found["buckets_s"]) + 1


def test_a_connector_counts_what_it_does():
    with create_connector("memory", namespace=uuid.uuid4().hex) as conn:
        conn.put("a", b"x" * 1000)
        conn.put("b", b"y", ttl=0)
        conn.get("a")
        with pytest.raises(LookupError):
            conn.get("b", timeout=0.1)
        stats = conn.stats()
    assert (stats["puts"], stats["gets"], stats["expired"], stats["pending"]) == (2, 1, 1, 0)
    assert stats["put_bytes"] >= stats["get_bytes"] >= 1000
    assert stats["failures"] == {"get:PayloadExpiredError": 1}
    assert (stats["backend"], stats["edge"], stats["replica"], stats["rank"]) == ("memory", "0->1", "0", "0")


def test_prometheus_sees_every_connector_and_forgets_it_with_it():
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    export_prometheus(registry)
    export_prometheus(registry)  # once more is no error
    edge = (uuid.uuid4().hex, "1")
    labels = {"backend": "memory", "edge": f"{edge[0]}->1", "replica": "0", "rank": "2"}
    with create_connector("memory", edge=edge, rank=2) as conn:
        conn.put("a", 1)
        conn.put("b", 2)
        conn.get("a")
        with pytest.raises(TimeoutError):
            conn.get("c", timeout=0)
        text = prometheus.generate_latest(registry).decode()
        assert registry.get_sample_value("omni_connector_puts_total", labels) == 2
        assert registry.get_sample_value("omni_connector_pending", labels) == 1
        error = {"operation": "get", "error": "TransferTimeoutError"}
        assert registry.get_sample_value("omni_connector_failures_total", {**labels, **error}) == 1
        assert registry.get_sample_value("omni_connector_put_time_s_count", labels) == 2
        assert registry.get_sample_value("omni_connector_put_time_s_bucket", {**labels, "le": "+Inf"}) == 2
        assert "# HELP omni_connector_bytes_held" in text
    del conn
    gc.collect()
    assert registry.get_sample_value("omni_connector_puts_total", labels) is None

"""How long a payload takes from the begin of `put` in one process to the end of `get` in another.

Both ends loop in one thread each. The consumer waits in `get` when the producer puts; CLOCK_MONOTONIC is the same for all
processes of a host. Beside every put the producer times a memcpy of the same size, so that both see the same noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.peers import Peers
from omni_connector_contract_tests.harness.worker import Acting
from omni_connector_core import Deadline, Key

__all__ = ["OneWay", "measure_one_way", "payload_of"]

PATIENCE_S = 300.0
SETTLE_S = 0.0005
"""How long the producer waits after a read until it puts the next: the consumer is back in `get` by then."""


class OneWay(NamedTuple):
    """Medians of one size, seconds.

    Attributes
    ----------
    nbytes
        Size of the tensor.
    transfer_s
        From the begin of put to the end of get.
    put_s
        The put alone.
    memcpy_s
        `numpy.copyto` of as many bytes.
    """

    nbytes: int
    transfer_s: float
    put_s: float
    memcpy_s: float


def payload_of(nbytes: int) -> dict[str, Any]:
    """Build a dict that holds one tensor (an array where torch is not installed)."""
    raw = np.random.Generator(np.random.SFC64(1)).integers(0, 256, nbytes, dtype=np.uint8)
    try:
        import torch
    except ImportError:
        return {"hidden": raw}
    return {"hidden": torch.from_numpy(raw)}


def measure_one_way(backend: Backend, nbytes: int, rounds: int) -> OneWay:
    """Measure one size between two fresh processes; the first fifth of the rounds warms up and does not count."""
    peers = Peers(processes=True, patience_s=PATIENCE_S)
    ends = Ends(backend, peers)
    try:
        getting = ends.consumer.start_act(_get_all, rounds, nbytes)
        started_s, put_s, memcpy_s = ends.producer.act(_put_all, rounds, nbytes)
        got_s = getting.result()
    finally:
        ends.close()
        peers.shutdown()
    warm = rounds // 5
    times = [got - started for started, got in zip(started_s, got_s, strict=True)]
    median = statistics.median
    return OneWay(nbytes, median(times[warm:]), median(put_s[warm:]), median(memcpy_s[warm:]))


def _put_all(acting: Acting, rounds: int, nbytes: int) -> tuple[list[float], list[float], list[float]]:
    connector = acting.connector
    transport = connector.transport
    payload = payload_of(nbytes)
    return put_loop(
        rounds,
        nbytes,
        put=lambda n: connector.put(f"k{n}", payload),
        wait_read=lambda n: transport.consumed(Key(f"k{n}"), deadline=Deadline(PATIENCE_S)),
    )


def _get_all(acting: Acting, rounds: int, nbytes: int) -> list[float]:
    return get_loop(rounds, nbytes, get=lambda n: acting.connector.get(f"k{n}", timeout=PATIENCE_S))


def put_loop(
    rounds: int, nbytes: int, *, put: Callable[[int], object], wait_read: Callable[[int], object]
) -> tuple[list[float], list[float], list[float]]:
    """Put again and again; returns when each put began, how long it took, and how long a memcpy took, seconds."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    started_s, put_s, memcpy_s = [], [], []
    for n in range(rounds):
        time.sleep(SETTLE_S)
        started = time.monotonic()
        put(n)
        done = time.monotonic()
        wait_read(n)
        copying = time.monotonic()
        np.copyto(target, source)
        memcpy_s.append(time.monotonic() - copying)
        started_s.append(started)
        put_s.append(done - started)
    return started_s, put_s, memcpy_s


def get_loop(rounds: int, nbytes: int, *, get: Callable[[int], Any]) -> list[float]:
    """Get again and again; returns when each get was done (CLOCK_MONOTONIC)."""
    got_s = []
    for n in range(rounds):
        payload = get(n)
        got_s.append(time.monotonic())
        assert payload["hidden"].nbytes == nbytes
        del payload
    return got_s

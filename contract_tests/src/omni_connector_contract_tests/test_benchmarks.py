"""Latency and bandwidth of any backend, by size, with a memcpy beside each.

``pytest --pyargs omni_connector_contract_tests --connector NAME --benchmark-only``; not run otherwise. A round is a payload put
here and got in another process, and a small answer back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from omni_connector_contract_tests.bench.one_way import payload_of
from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.harness.ends import End, Ends
from omni_connector_contract_tests.harness.peers import Peers
from omni_connector_contract_tests.harness.worker import Acting
from omni_connector_core import create_connector

ROUNDS = {2**10: 200, 2**16: 200, 2**20: 100, 2**24: 30, 2**28: 5}
WARM_UP = 3
CONFIG = {"timeout_s": 60.0}
BACK = ("1", "0")


def name_of(nbytes: int) -> str:
    """Name a size."""
    return f"{nbytes >> 20} MB" if nbytes >= 2**20 else f"{nbytes >> 10} KB"


sizes = pytest.mark.parametrize("nbytes", ROUNDS, ids=name_of)


@pytest.fixture
def ends(connector_backend: Backend, contract_peers: Peers) -> Iterator[Ends]:
    """Ends in processes of their own."""
    ends = Ends(connector_backend, contract_peers)
    yield ends
    ends.close()


def answer_all(acting: Acting, back: dict[str, Any], count: int) -> None:
    """Get payload after payload, and answer each with its size."""
    connector = acting.connector
    with create_connector(connector.backend, **back) as answers:
        for n in range(count):
            answers.put(f"k{n}", connector.get(f"k{n}")["hidden"].nbytes)
        connector.get("stop")  # not before the last answer was taken


@sizes
@pytest.mark.benchmark(disable_gc=True)
def test_transfer(benchmark: Any, connector_backend: Backend, ends: Ends, nbytes: int) -> None:
    """Put a dict that holds one tensor, and wait until the other process has it and has said so."""
    benchmark.group = name_of(nbytes)
    config = {**CONFIG, **connector_backend.config}
    there: End = ends.open("consumer", config=CONFIG)
    back: dict[str, Any] = {"config": config, "edge": BACK, "namespace": ends.namespace}
    answering = there.start_act(answer_all, {**back, "role": "producer"}, ROUNDS[nbytes] + WARM_UP)
    payload, numbers = payload_of(nbytes), iter(range(ROUNDS[nbytes] + WARM_UP))
    connector_backend.describe()
    with (
        create_connector(connector_backend.name, config, role="producer", namespace=ends.namespace) as puts,
        create_connector(connector_backend.name, **back, role="consumer") as gets,
    ):

        def round_trip() -> None:
            key = f"k{next(numbers)}"
            puts.put(key, payload)
            assert gets.get(key) == nbytes

        benchmark.pedantic(round_trip, rounds=ROUNDS[nbytes], warmup_rounds=WARM_UP)
        puts.put("stop", None)
        answering.result(CONFIG["timeout_s"])
    benchmark.extra_info["GB/s"] = round(nbytes / benchmark.stats.stats.median / 1e9, 3)


@sizes
@pytest.mark.benchmark(disable_gc=True)
def test_memcpy(benchmark: Any, nbytes: int) -> None:
    """Copy as many bytes within one process."""
    benchmark.group = name_of(nbytes)
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    benchmark.pedantic(np.copyto, (target, source), rounds=ROUNDS[nbytes], warmup_rounds=WARM_UP)
    benchmark.extra_info["GB/s"] = round(nbytes / benchmark.stats.stats.median / 1e9, 3)

"""Whole payloads: against a memcpy of the same size, and against vLLM-Omni's own connector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from omni_connector_contract_tests.bench.one_way import OneWay, measure_one_way
from omni_connector_contract_tests.bench.ratio import Ratio
from omni_connector_contract_tests.bench.upstream import VERSION, measure_upstream
from omni_connector_contract_tests.harness.backend import Backend

__all__ = ["SIZES", "Size", "Transfers"]


class Size(NamedTuple):
    """One size and what it may cost.

    Attributes
    ----------
    nbytes, rounds
        Size of the tensor, and how often it is sent.
    memcpy_bar
        How many times a memcpy it may take; None: `longest_s` counts.
    longest_s
        How long it may take, seconds.
    upstream_bar
        How many times faster than vLLM-Omni's connector it must be.
    """

    name: str
    nbytes: int
    rounds: int
    memcpy_bar: float | None
    longest_s: float
    upstream_bar: float


SIZES = (
    Size("1 KB", 2**10, 300, None, 60e-6, 8),
    Size("64 KB", 2**16, 300, None, 60e-6, 8),
    Size("1 MB", 2**20, 150, 2.0, 0, 20),
    Size("16 MB", 2**24, 40, 1.3, 0, 40),
    Size("256 MB", 2**28, 10, 1.3, 0, 40),
)


class Transfers:
    """Measures every size; the raw numbers stay in `measured` and `upstream`.

    A backend that leaves the host is shown beside a memcpy and judged by nothing here: its script has its bars.

    Parameters
    ----------
    backend
        What is measured.
    upstream
        Folder with vLLM-Omni's wheel; None leaves the comparison out.
    """

    def __init__(self, backend: Backend, upstream: Path | None) -> None:
        self._backend, self._upstream = backend, upstream
        self.measured: list[OneWay] = []
        self.upstream: list[OneWay] = []

    def measure(self) -> Iterator[Ratio]:
        """Measure size after size."""
        judged = not self._backend.capabilities.cross_host
        for size in SIZES:
            ours = measure_one_way(self._backend, size.nbytes, size.rounds)
            self.measured.append(ours)
            if judged and size.memcpy_bar is None:
                yield Ratio(f"{size.name} in at most {size.longest_s * 1e6:g} us", ours.transfer_s, size.longest_s, 1.0)
            else:
                bar = size.memcpy_bar if judged else None
                yield Ratio(f"{size.name}, put -> got, against memcpy", ours.transfer_s, ours.memcpy_s, bar)
            if judged and self._upstream is not None:
                theirs = measure_upstream(self._upstream, size.nbytes, max(size.rounds // 3, 6))
                self.upstream.append(theirs)
                name = f"{size.name} against vllm-omni {VERSION}, {size.upstream_bar:g} times faster"
                yield Ratio(name, ours.transfer_s, theirs.transfer_s, 1 / size.upstream_bar)

"""Draws what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omni_connector_contract_tests.bench.one_way import OneWay

__all__ = ["plot"]


def plot(path: Path, name: str, measured: Sequence[OneWay], upstream: Sequence[OneWay]) -> bool:
    """Plot time by size, one line each for the backend, memcpy and vLLM-Omni; False where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    sizes = [one_way.nbytes for one_way in measured]
    axes.loglog(sizes, [one_way.transfer_s * 1e6 for one_way in measured], "o-", label=name)
    axes.loglog(sizes, [one_way.memcpy_s * 1e6 for one_way in measured], "--", color="gray", label="one memcpy")
    if upstream:
        sizes = [one_way.nbytes for one_way in upstream]
        axes.loglog(sizes, [one_way.transfer_s * 1e6 for one_way in upstream], "s-", label="vllm-omni shared memory")
    axes.set_xticks(sizes, [f"{n >> 20} MB" if n >= 2**20 else f"{n >> 10} KB" for n in sizes])
    axes.set_xlabel("tensor in a dict")
    axes.set_ylabel("put to got, median, us")
    axes.set_title("One payload from process to process")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True

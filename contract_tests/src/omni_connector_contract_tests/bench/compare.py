"""Draws all backends that were measured: ``python -m omni_connector_contract_tests.bench.compare RESULTS PLOT``.

``RESULTS`` is the folder with a file for each backend, as the bench leaves it; `make bench` calls this when all have run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from omni_connector_contract_tests.bench.one_way import OneWay

__all__ = ["draw", "read"]

MARKERS = "osD^vP"
MEMCPY = "one memcpy"


def read(folder: Path) -> tuple[dict[str, list[OneWay]], str]:
    """Return the transfers of every backend that has any, by name; and where and when they were measured."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    results = [result for result in results if result.get("transfers")]
    backends = {result["connector"]: [OneWay(**row) for row in result["transfers"]] for result in results}
    dates, loads = ([result["date"] for result in results], [result["machine"]["load"] for result in results])
    machines = {"{cpu}, {cpus} cores".format(**result["machine"]) for result in results}
    if not results:
        return backends, ""
    return backends, f"{min(dates)}, {' and '.join(sorted(machines))}, load {min(loads):.1f} to {max(loads):.1f}"


def draw(path: Path, backends: Mapping[str, Sequence[OneWay]], where: str) -> None:
    """Plot latency and bandwidth by size, a line for each backend, and a memcpy of the same bytes (the fastest that was seen)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    sizes = sorted({row.nbytes for rows in backends.values() for row in rows})
    fastest = [min(row.memcpy_s for rows in backends.values() for row in rows if row.nbytes == n) for n in sizes]
    figure, (latency, bandwidth) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for marker, (name, rows) in zip(MARKERS * len(backends), backends.items(), strict=False):
        measured = sorted(rows)
        along = [row.nbytes for row in measured]
        how = {"label": name, "marker": marker, "markersize": 5.5, "linewidth": 1.8}
        latency.plot(along, [row.transfer_s * 1e6 for row in measured], **how)
        bandwidth.plot(along, [row.nbytes / row.transfer_s / 1e9 for row in measured], **how)
    how = {"label": MEMCPY, "color": "0.55", "linestyle": "--", "linewidth": 1.4}
    latency.plot(sizes, [seconds * 1e6 for seconds in fastest], **how)
    bandwidth.plot(sizes, [n / seconds / 1e9 for n, seconds in zip(sizes, fastest, strict=True)], **how)
    for axes, title in ((latency, "Latency: put to got, us"), (bandwidth, "Bandwidth: GB/s")):
        axes.set(xscale="log", yscale="log", xlabel="tensor in a dict", title=title)
        axes.set_xticks(sizes, [_named(n) for n in sizes])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    latency.legend(frameon=False)
    figure.suptitle(f"One payload from process to process on one host, medians of one run\n{where}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _named(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m omni_connector_contract_tests.bench.compare", description=__doc__)
    parser.add_argument("results", type=Path, help="folder with the results")
    parser.add_argument("plot", type=Path, help="file to write")
    arguments = parser.parse_args()
    backends, where = read(arguments.results)
    if not backends:
        sys.exit(f"{arguments.results} has no transfers")
    draw(arguments.plot, backends, where)
    print(f"{arguments.plot}: {', '.join(backends)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

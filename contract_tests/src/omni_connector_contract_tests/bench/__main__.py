"""Measure a backend, side by side with a memcpy, the vendor's own calls and vLLM-Omni's connectors, in one run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.table import Table

from omni_connector_contract_tests.bench import codec, flows
from omni_connector_contract_tests.bench.against import Bench, load_script
from omni_connector_contract_tests.bench.one_way import OneWay
from omni_connector_contract_tests.bench.plot import plot
from omni_connector_contract_tests.bench.ratio import Ratio
from omni_connector_contract_tests.bench.transfers import Transfers
from omni_connector_contract_tests.bench.upstream import fetch
from omni_connector_contract_tests.harness.backend import read_config, running

PARTS = ("codec", "transfers", "flows", "raw")


def main() -> int:
    """Run the command; the exit status is 1 only with ``--strict`` and a bar that was missed."""
    parser = argparse.ArgumentParser(prog="python -m omni_connector_contract_tests.bench", description=__doc__)
    parser.add_argument("--connector", default="shared_memory", metavar="NAME", help="the backend (%(default)s)")
    parser.add_argument("--connector-config", type=Path, metavar="FILE", help="its options, YAML or JSON")
    parser.add_argument(
        "--service-setting", action="append", default=[], metavar="NAME=VALUE", help="a setting of its daemons"
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="SCRIPT",
        help="measures the backend beside the vendor's own calls: the part `raw`",
    )
    parser.add_argument(
        "--without-upstream", action="store_true", help="do not fetch and measure vLLM-Omni's connector"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/bench"), metavar="FOLDER", help="for results (%(default)s)"
    )
    parser.add_argument("--strict", action="store_true", help="exit 1 when a bar is missed")
    arguments = parser.parse_args()
    config = None if arguments.connector_config is None else read_config(arguments.connector_config)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    upstream = None if arguments.without_upstream else fetch(out / "upstream")
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    if busy > 0.5:
        console.print(f"this machine is busy ({busy:.1f} waiting processes a core): times are longer than they need be")
    name: str = arguments.connector
    ratios = []
    script = arguments.against and load_script(arguments.against)
    wanted = getattr(script, "SERVICE", ()) if config is None else ()
    settings = [*wanted, *arguments.service_setting]
    with running(name, config, settings=settings) as backend:
        transfers = Transfers(backend, upstream)
        for ratio in _measure(arguments.part, script, Bench(backend, upstream), transfers):
            console.print(str(ratio))
            ratios.append(ratio)
    _print_table(console, name, ratios)
    _write(out / f"{name}.json", name, ratios, transfers)
    if transfers.measured:
        plot(out / f"{name}.png", name, transfers.measured, transfers.upstream)
    console.print(f"results in {out}")
    return int(arguments.strict and any(ratio.held is False for ratio in ratios))


def _measure(
    wanted: Sequence[str] | None, script: ModuleType | None, bench: Bench, transfers: Transfers
) -> Iterator[Ratio]:
    # what leaves the host is not held to a memcpy; what the vendor's calls take is its measure
    parts = wanted or (("transfers", "raw") if bench.backend.capabilities.cross_host else PARTS)
    if "codec" in parts:
        yield from codec.measure()
    if "transfers" in parts:
        yield from transfers.measure()
    if "flows" in parts:
        yield from flows.measure(bench.backend)
    if "raw" in parts and script is not None:
        yield from script.measure(bench)


def _print_table(console: Console, connector: str, ratios: list[Ratio]) -> None:
    table = Table(title=f"omni-connector bench: {connector}")
    for column in ("", "measured", "against", "ratio", "at most", ""):
        table.add_column(column, justify="left" if column == "" else "right")
    for ratio in ratios:
        table.add_row(
            ratio.name,
            f"{ratio.measured_s * 1e6:,.1f} us",
            f"{ratio.reference_s * 1e6:,.1f} us",
            f"{ratio.ratio:.3f}",
            "" if ratio.bar is None else f"{ratio.bar:.3g}",
            "[bold]missed[/bold]" if ratio.held is False else ratio.verdict,
        )
    console.print(table)


def _write(path: Path, connector: str, ratios: list[Ratio], transfers: Transfers) -> None:
    def rows(measured: list[OneWay]) -> list[dict[str, float]]:
        return [one_way._asdict() for one_way in measured]

    results = {
        "connector": connector,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": {
            "cpu": _cpu(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
        },
        "ratios": [{**ratio._asdict(), "ratio": ratio.ratio, "held": ratio.held} for ratio in ratios],
        "transfers": rows(transfers.measured),
        "upstream": rows(transfers.upstream),
    }
    path.write_text(json.dumps(results, indent=1) + "\n")


def _cpu() -> str:
    """Name the processor, as Linux does."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's own SharedMemoryConnector against shared_memory: the same server, the same requests.

    make bench-vllm        or        .venv-vllm/bin/python serve/bench_vllm.py [--mode full|chunks] [--strict]

For payloads of 1 KB, 1 MB and 64 MB a request, in one piece (mode full) and in four chunks (mode chunks):

in the connector
    What the engine's threads spend in the puts, and in the gets that bring something, of one request; requests one by one.
in empty polls
    What they spend in the gets of one request that bring nothing.
first audio
    From the request to the first audio of its stream; requests one by one.
a request of eight, its CPU time
    Eight clients at once: how long they take, over the requests; CPU time is that of every process of the server.

Both servers are up at once and take turns, request by request and then batch by batch, so that whatever else the machine does
meets both. Everything is a median, of requests or of batches, and stands with its quartiles in the results. A mode takes
three minutes on two cores; the results of both are collected in one file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "tests" / "vllm"))

from omni_server import ONE_PROCESS_A_STAGE, Server, write_deploy

from omni_connector_contract_tests.bench.ratio import Ratio

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "64 MB": 1 << 26}
BUILT_IN, OURS = "SharedMemoryConnector", "shared_memory"
MODES = ("full", "chunks")
CLIENTS = 8
WARM_UP, ROUNDS, ONE_BY_ONE, AT_ONCE = 8, 8, 4, 16
# Ours at least ten times faster in the connector, and never slower end to end: two runs of one server differ by 5 %.
CONNECTOR_BAR = {"1 MB": 0.1, "64 MB": 0.1}
END_TO_END_BAR = 1.05

Row = dict[str, Any]


class Bench:
    """A server over one connector, and what was measured of it.

    Parameters
    ----------
    mode, connector
        What to serve.
    directory
        For its files.
    model
        A checkpoint by ``omni_cpu_rig.checkpoint``.
    """

    def __init__(self, mode: str, connector: str, directory: Path, model: Path) -> None:
        self._payload_file, self._timing = directory / "nbytes", directory / "timing"
        self._timing.mkdir(parents=True)
        self._payload_file.write_text("1024")
        changes = {"pipeline": "tinyomni_bulk", "connectors.edge.name": connector, "async_chunk": mode == "chunks"}
        environment = {
            **ONE_PROCESS_A_STAGE,
            "OMNI_CPU_RIG_PAYLOAD_FILE": str(self._payload_file),
            "OMNI_CPU_RIG_TIMING": str(self._timing),
            "OMNI_CONNECTOR_STATS_INTERVAL_S": "60",  # as an operator has it
        }
        deploy = write_deploy(directory / "deploy.yaml", "two", changes)
        self.server = Server(deploy, model, directory, environment=environment)
        self.what = {"mode": mode, "connector": connector}
        self._alone: list[tuple[float, float]] = []
        self._measured: dict[str, list[float]] = {}

    def start(self, nbytes: int) -> None:
        """Measure from here on, with payloads of another size."""
        self._payload_file.write_text(str(nbytes))
        ask(self.server, WARM_UP, 2)
        self._alone = []
        self._measured = {"first_audio_s": [], "request_s": [], "cpu_s": []}

    def alone(self, number: int) -> None:
        """Send one request."""
        start_s = time.monotonic()
        self._measured["first_audio_s"].append(self.server.seconds_to_first_audio(f"hello {number}"))
        self._alone.append((start_s, time.monotonic()))

    def at_once(self) -> None:
        """Send a batch of requests from several clients."""
        start_s, cpu_start_s = time.monotonic(), cpu_seconds(self.server)
        ask(self.server, AT_ONCE, CLIENTS)
        self._measured["request_s"].append((time.monotonic() - start_s) / AT_ONCE)
        self._measured["cpu_s"].append((cpu_seconds(self.server) - cpu_start_s) / AT_ONCE)

    def row(self, size: str) -> Row:
        """Everything measured since `start`, per request: the median, and the quartiles beside it."""
        calls = records(self._timing)
        each = [[call for call in calls if start_s <= call["at_s"] < end_s] for start_s, end_s in self._alone]
        for request in each:
            assert total(request, "nbytes", "put") >= SIZES[size], f"{request} has less than {size}"
        measured = {
            "put_s": [total(request, "s", "put") for request in each],
            "get_s": [total(request, "s", "get") for request in each],
            "connector_s": [total(request, "s") for request in each],
            "empty_polls_s": [total(request, "polls_s") for request in each],
            "empty_polls": [total(request, "polls") for request in each],
            **self._measured,
        }
        quartiles = {name: statistics.quantiles(values, n=4) for name, values in measured.items()}
        row: Row = {**self.what, "size": size, "quartiles": {name: [q[0], q[2]] for name, q in quartiles.items()}}
        return row | {name: q[1] for name, q in quartiles.items()}


def measure(mode: str, sizes: Iterable[str], directory: Path, model: Path) -> Iterator[Row]:
    """Serve over both connectors and yield a row per size and connector."""
    with contextlib.ExitStack() as running:
        benches = [Bench(mode, name, directory / name, model) for name in (BUILT_IN, OURS)]
        for bench in benches:
            running.enter_context(bench.server)
        for size in sizes:
            for bench in benches:
                bench.start(SIZES[size])
            for round_number in range(ROUNDS):
                for number in range(ONE_BY_ONE):
                    for bench in in_turn(benches, number):
                        bench.alone(number)
                for bench in in_turn(benches, round_number):
                    bench.at_once()
            yield from (bench.row(size) for bench in benches)


def in_turn(benches: list[Bench], number: int) -> list[Bench]:
    """Let each be the first every other time."""
    return benches if number % 2 else benches[::-1]


def ask(server: Server, requests: int, clients: int) -> None:
    """Send requests from several clients at once."""
    with ThreadPoolExecutor(clients) as pool:
        replies = list(pool.map(server.chat, [f"hello {number}" for number in range(requests)]))
    assert {reply.status for reply in replies} == {HTTPStatus.OK}, replies


def records(timing: Path) -> list[Row]:
    """Every call that was timed, on the clock that all processes share."""
    return [json.loads(line) for path in timing.iterdir() for line in path.read_text().splitlines()]


def total(calls: list[Row], what: str, op: str | None = None) -> float:
    """Sum over the calls (of one kind)."""
    return float(sum(call[what] for call in calls if op in (None, call["op"])))


def cpu_seconds(server: Server) -> float:
    """CPU time of every process of the server, user and system."""
    times = [process.cpu_times() for process in server.tree()]
    return sum(t.user + t.system for t in times)


def spread(row: Row, name: str) -> str:
    """A median with its quartiles."""
    scale = 1e3 if name.endswith("_s") else 1
    low, high = (value * scale for value in row["quartiles"][name])
    return f"{row[name] * scale:.2f} ({low:.2f}..{high:.2f})"


def judge(rows: list[Row]) -> Iterator[Ratio]:
    """Hold ours against theirs."""
    found = {(row["mode"], row["size"], row["connector"]): row for row in rows}
    for (mode, size, connector), ours in found.items():
        if connector != OURS:
            continue
        theirs = found[mode, size, BUILT_IN]
        spent = ours["connector_s"], theirs["connector_s"]
        yield Ratio(f"{mode} {size}: in the connector", *spent, CONNECTOR_BAR.get(size))
        for name, what in (
            ("first audio", "first_audio_s"),
            ("a request of eight", "request_s"),
            ("its CPU time", "cpu_s"),
        ):
            yield Ratio(f"{mode} {size}: {name}", ours[what], theirs[what], END_TO_END_BAR)


def main() -> int:
    """Measure, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, action="append", help="only this one; may be repeated")
    parser.add_argument("--size", choices=SIZES, action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--json", type=Path, default=Path("build/bench-vllm/results.json"), help="results (%(default)s)"
    )
    parser.add_argument("--strict", action="store_true", help="exit 1 when a bar is missed")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        subprocess.run([sys.executable, "-m", "omni_cpu_rig.checkpoint", str(model)], check=True)
        for mode in arguments.mode or MODES:
            measured = list(measure(mode, arguments.size or SIZES, Path(temporary) / mode, model))
            renewed = {(mode, row["size"]) for row in measured}
            rows = [row for row in rows if (row["mode"], row["size"]) not in renewed] + measured
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    columns = ("put_s", "get_s", "empty_polls_s", "empty_polls", "first_audio_s", "request_s", "cpu_s")
    print(f"{'':40}" + "".join(f"{name.replace('_s', '_ms'):>22}" for name in columns))
    for row in sorted(rows, key=lambda row: (row["mode"], list(SIZES).index(row["size"]), row["connector"])):
        who = f"{row['mode']} {row['size']} {row['connector']}"
        print(f"{who:40}" + "".join(f"{spread(row, name):>22}" for name in columns))
    ratios = list(judge(rows))
    for ratio in ratios:
        print(ratio)
    return int(arguments.strict and any(ratio.held is False for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())

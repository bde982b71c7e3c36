# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's own SharedMemoryConnector against shared_memory: the same server, the same requests.

    make bench-vllm        or        .venv-vllm/bin/python serve/bench_vllm.py [--mode full|chunks] [--strict]

For payloads of 1 KB, 1 MB and 64 MB a request, in one piece (mode full) and in four chunks (mode chunks):

in the connector
    What the engine's threads spend in the puts, and in the gets that bring something, of one request; requests one by one.
in empty polls
    What they spend in the gets of one request that bring nothing.
first audio
    From the request to the first audio of its stream; median of requests one by one.
a request of eight, its CPU time
    Eight clients at once: how long they take, over the requests; CPU time is that of every process of the server.

Both servers are up at once and take turns, so that whatever else the machine does meets both. A mode takes three minutes
on two cores; the results of both are collected in one file.
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
from collections.abc import Iterator
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
WARM_UP, ROUNDS, ONE_BY_ONE, AT_ONCE = 8, 4, 5, 16
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
        }
        deploy = write_deploy(directory / "deploy.yaml", "two", changes)
        self.server = Server(deploy, model, directory, environment=environment)
        self.what = {"mode": mode, "connector": connector}
        self._calls: list[Row] = []
        self._first_audio_s: list[float] = []
        self._elapsed_s = self._cpu_s = 0.0

    def start(self, nbytes: int) -> None:
        """Measure from here on, with payloads of another size."""
        self._payload_file.write_text(str(nbytes))
        ask(self.server, WARM_UP, 2)
        self._calls, self._first_audio_s = [], []
        self._elapsed_s = self._cpu_s = 0.0

    def round(self) -> None:
        """Send some requests one by one, then some at once."""
        since_s = time.monotonic()
        self._first_audio_s += [self.server.seconds_to_first_audio(f"hello {number}") for number in range(ONE_BY_ONE)]
        self._calls += records(self._timing, since_s)
        start_s, cpu_start_s = time.monotonic(), cpu_seconds(self.server)
        ask(self.server, AT_ONCE, CLIENTS)
        self._elapsed_s += time.monotonic() - start_s
        self._cpu_s += cpu_seconds(self.server) - cpu_start_s

    def row(self, size: str) -> Row:
        """Everything measured since `start`, per request."""
        alone, at_once = len(self._first_audio_s), ROUNDS * AT_ONCE
        moved = sum(call["nbytes"] for call in self._calls if call["op"] == "put")
        assert moved >= SIZES[size] * alone, f"{moved} bytes were put for {alone} requests of {size}"
        return {
            **self.what,
            "size": size,
            "put_s": total(self._calls, "s", "put") / alone,
            "get_s": total(self._calls, "s", "get") / alone,
            "empty_polls_s": total(self._calls, "polls_s") / alone,
            "empty_polls": total(self._calls, "polls") / alone,
            "first_audio_s": statistics.median(self._first_audio_s),
            "request_s": self._elapsed_s / at_once,
            "cpu_s": self._cpu_s / at_once,
        }


def measure(mode: str, directory: Path, model: Path) -> Iterator[Row]:
    """Serve over both connectors and yield a row per size and connector."""
    with contextlib.ExitStack() as running:
        benches = [Bench(mode, name, directory / name, model) for name in (BUILT_IN, OURS)]
        for bench in benches:
            running.enter_context(bench.server)
        for size, nbytes in SIZES.items():
            for bench in benches:
                bench.start(nbytes)
            for _ in range(ROUNDS):
                for bench in benches:
                    bench.round()
            yield from (bench.row(size) for bench in benches)


def ask(server: Server, requests: int, clients: int) -> None:
    """Send requests from several clients at once."""
    with ThreadPoolExecutor(clients) as pool:
        replies = list(pool.map(server.chat, [f"hello {number}" for number in range(requests)]))
    assert {reply.status for reply in replies} == {HTTPStatus.OK}, replies


def records(timing: Path, since_s: float) -> list[Row]:
    """Every call that was timed since then, on the clock that all processes share."""
    calls = [json.loads(line) for path in timing.iterdir() for line in path.read_text().splitlines()]
    return [call for call in calls if call["at_s"] >= since_s]


def total(calls: list[Row], what: str, op: str | None = None) -> float:
    """Sum over the calls (of one kind)."""
    return float(sum(call[what] for call in calls if op in (None, call["op"])))


def cpu_seconds(server: Server) -> float:
    """CPU time of every process of the server, user and system."""
    times = [process.cpu_times() for process in server.tree()]
    return sum(t.user + t.system for t in times)


def judge(rows: list[Row]) -> Iterator[Ratio]:
    """Hold ours against theirs."""
    found = {(row["mode"], row["size"], row["connector"]): row for row in rows}
    for (mode, size, connector), ours in found.items():
        if connector != OURS:
            continue
        theirs = found[mode, size, BUILT_IN]
        spent = [row["put_s"] + row["get_s"] for row in (ours, theirs)]
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
    parser.add_argument("--json", type=Path, default=Path("build/bench/vllm.json"), help="results (%(default)s)")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a bar is missed")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        subprocess.run([sys.executable, "-m", "omni_cpu_rig.checkpoint", str(model)], check=True)
        for mode in arguments.mode or MODES:
            measured = list(measure(mode, Path(temporary) / mode, model))
            rows = [row for row in rows if row["mode"] != mode] + measured
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    columns = ("put_s", "get_s", "empty_polls_s", "empty_polls", "first_audio_s", "request_s", "cpu_s")
    print(f"{'':40}" + "".join(f"{name.replace('_s', '_ms'):>16}" for name in columns))
    for row in sorted(rows, key=lambda row: (row["mode"], list(SIZES).index(row["size"]), row["connector"])):
        values = (row[name] * (1e3 if name.endswith("_s") else 1) for name in columns)
        who = f"{row['mode']} {row['size']} {row['connector']}"
        print(f"{who:40}" + "".join(f"{value:16.3f}" for value in values))
    ratios = list(judge(rows))
    for ratio in ratios:
        print(ratio)
    return int(arguments.strict and any(ratio.held is False for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())

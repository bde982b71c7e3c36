# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's own SharedMemoryConnector against shared_memory: the same server, the same requests.

    make bench-vllm        or        .venv-vllm/bin/python serve/bench_vllm.py [--mode MODE] [--connector NAME] [--strict]

For payloads of 1 KB, 1 MB and 64 MB a request, in one piece (mode full) and in four chunks (mode chunks):

in the connector
    What the engine's threads spend in the puts, and in the gets that bring something, of one request; requests one by one.
in empty polls
    What they spend in the gets of one request that bring nothing.
first audio
    From the request to the first audio of its stream; median of requests one by one.
requests a second, CPU time
    Of eight clients at once; CPU time is that of every process of the server, user and system.

Each mode and connector is a server of its own; a part of them can be measured at a time: the results are collected in one
file, and judged when both connectors are there.
"""

from __future__ import annotations

import argparse
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
WARM_UP, ONE_BY_ONE, AT_ONCE = 8, 16, 48
# Ours at least ten times faster in the connector, and never slower end to end: two runs of one server differ by 5 %.
CONNECTOR_BAR = {"1 MB": 0.1, "64 MB": 0.1}
END_TO_END_BAR = 1.05

Row = dict[str, Any]


def measure(mode: str, connector: str, directory: Path, model: Path) -> Iterator[Row]:
    """Serve over one connector and yield one row per size."""
    payload_file, timing = directory / "nbytes", directory / "timing"
    timing.mkdir(parents=True)
    payload_file.write_text("1024")
    changes = {"pipeline": "tinyomni_bulk", "connectors.edge.name": connector, "async_chunk": mode == "chunks"}
    deploy = write_deploy(directory / "deploy.yaml", "two", changes)
    environment = {
        **ONE_PROCESS_A_STAGE,
        "OMNI_CPU_RIG_PAYLOAD_FILE": str(payload_file),
        "OMNI_CPU_RIG_TIMING": str(timing),
    }
    with Server(deploy, model, directory, environment=environment) as server:
        for size, nbytes in SIZES.items():
            payload_file.write_text(str(nbytes))
            ask(server, WARM_UP, 2)
            since_s = time.monotonic()
            first_audio_s = [server.seconds_to_first_audio(f"hello {number}") for number in range(ONE_BY_ONE)]
            calls = records(timing, since_s)
            start_s, cpu_start_s = time.monotonic(), cpu_seconds(server)
            ask(server, AT_ONCE, CLIENTS)
            elapsed_s = time.monotonic() - start_s
            moved = sum(call["nbytes"] for call in calls if call["op"] == "put")
            assert moved >= nbytes * ONE_BY_ONE, f"{moved} bytes were put for {ONE_BY_ONE} requests of {nbytes}"
            yield {
                "mode": mode,
                "connector": connector,
                "size": size,
                "put_s": total(calls, "s", "put") / ONE_BY_ONE,
                "get_s": total(calls, "s", "get") / ONE_BY_ONE,
                "empty_polls_s": total(calls, "polls_s") / ONE_BY_ONE,
                "empty_polls": total(calls, "polls") / ONE_BY_ONE,
                "first_audio_s": statistics.median(first_audio_s),
                "request_s": elapsed_s / AT_ONCE,
                "cpu_s": (cpu_seconds(server) - cpu_start_s) / AT_ONCE,
            }


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
    """Hold ours against theirs, where both were measured."""
    found = {(row["mode"], row["size"], row["connector"]): row for row in rows}
    for (mode, size, connector), ours in found.items():
        theirs = found.get((mode, size, BUILT_IN))
        if connector != OURS or theirs is None:
            continue
        if size in CONNECTOR_BAR:
            spent = [row["put_s"] + row["get_s"] for row in (ours, theirs)]
            yield Ratio(f"{mode} {size}: in the connector", *spent, CONNECTOR_BAR[size])
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
    parser.add_argument("--connector", choices=(BUILT_IN, OURS), action="append", help="only this one")
    parser.add_argument("--json", type=Path, default=Path("build/bench/vllm.json"), help="results (%(default)s)")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a bar is missed")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        subprocess.run([sys.executable, "-m", "omni_cpu_rig.checkpoint", str(model)], check=True)
        for mode in arguments.mode or MODES:
            for connector in arguments.connector or (BUILT_IN, OURS):
                measured = list(measure(mode, connector, Path(temporary) / f"{mode}-{connector}", model))
                rows = [row for row in rows if (row["mode"], row["connector"]) != (mode, connector)] + measured
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
    return int(arguments.strict and not all(ratio.held for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())

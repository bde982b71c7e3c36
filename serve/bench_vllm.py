# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's own SharedMemoryConnector against shared_memory, under the same server and the same requests.

    make bench-vllm        or        .venv-vllm/bin/python serve/bench_vllm.py [--json FILE]

For payloads of 1 KB, 1 MB and 64 MB a request: the time that the engine's threads spend in put and get (empty polls are
counted apart), the time to the first audio, requests a second and CPU time with eight clients.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "tests" / "vllm"))

from omni_server import ONE_PROCESS_A_STAGE, Server, write_deploy

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "64 MB": 1 << 26}
BUILT_IN, OURS = "SharedMemoryConnector", "shared_memory"
CLIENTS = 8
ONE_BY_ONE, AT_ONCE = 12, 24


def measure(connector: str, directory: Path, model: Path) -> Iterator[dict[str, Any]]:
    """Serve over one connector and yield one row per size."""
    payload_file, timing = directory / "nbytes", directory / "timing"
    timing.mkdir(parents=True)
    payload_file.write_text("1024")
    deploy = write_deploy(
        directory / "deploy.yaml", "two", {"pipeline": "tinyomni_bulk", "connectors.edge.name": connector}
    )
    environment = {
        **ONE_PROCESS_A_STAGE,
        "OMNI_CPU_RIG_PAYLOAD_FILE": str(payload_file),
        "OMNI_CPU_RIG_TIMING": str(timing),
    }
    with Server(deploy, model, directory, environment=environment) as server:
        for size, nbytes in SIZES.items():
            payload_file.write_text(str(nbytes))
            for number in range(4):
                server.chat(f"hello {number}")
            since_s = time.monotonic()
            first_audio_s = [server.seconds_to_first_audio(f"hello {number}") for number in range(ONE_BY_ONE)]
            calls = records(timing, since_s)
            start_s, cpu_start_s = time.monotonic(), cpu_seconds(server)
            with ThreadPoolExecutor(CLIENTS) as pool:
                replies = list(pool.map(server.chat, [f"hello {number}" for number in range(AT_ONCE)]))
            elapsed_s = time.monotonic() - start_s
            assert all(reply.status == 200 for reply in replies), replies
            yield {
                "connector": connector,
                "size": size,
                "put_ms": median_ms(calls, "put", "s"),
                "get_ms": median_ms(calls, "get", "s"),
                "empty_poll_us": 1e3 * sum_ms(calls, "polls_s") / max(1, sum(call["polls"] for call in calls)),
                "first_audio_ms": 1e3 * statistics.median(first_audio_s),
                "requests_per_s": AT_ONCE / elapsed_s,
                "cpu_ms_per_request": 1e3 * (cpu_seconds(server) - cpu_start_s) / AT_ONCE,
            }


def records(timing: Path, since_s: float) -> list[dict[str, Any]]:
    """Every call that was timed since then, on the clock that all processes share."""
    calls = [json.loads(line) for path in timing.iterdir() for line in path.read_text().splitlines()]
    return [call for call in calls if call["at_s"] >= since_s]


def median_ms(calls: list[dict[str, Any]], op: str, what: str) -> float:
    """Median over the calls of one kind, milliseconds."""
    return 1e3 * statistics.median(call[what] for call in calls if call["op"] == op)


def sum_ms(calls: list[dict[str, Any]], what: str) -> float:
    """Sum over all calls, milliseconds."""
    return 1e3 * sum(call[what] for call in calls)


def cpu_seconds(server: Server) -> float:
    """CPU time of every process of the server, user and system."""
    times = [process.cpu_times() for process in server.tree()]
    return sum(t.user + t.system for t in times)


def main() -> None:
    """Measure, print a table, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("build/bench/vllm.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        subprocess.run([sys.executable, "-m", "omni_cpu_rig.checkpoint", str(model)], check=True)
        rows = [row for name in (BUILT_IN, OURS) for row in measure(name, Path(temporary) / name, model)]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=1))
    columns = list(rows[0])
    print(" | ".join(columns))
    for row in rows:
        print(" | ".join(f"{row[name]:.2f}" if isinstance(row[name], float) else row[name] for name in columns))
    for size in SIZES:
        theirs, ours = (next(r for r in rows if (r["connector"], r["size"]) == (n, size)) for n in (BUILT_IN, OURS))
        less = (theirs["put_ms"] + theirs["get_ms"]) / (ours["put_ms"] + ours["get_ms"])
        print(f"{size}: {less:.1f} x less time in the connector", end="")
        for what in ("first_audio_ms", "requests_per_s", "cpu_ms_per_request"):
            print(f", {what} {theirs[what]:.1f} -> {ours[what]:.1f}", end="")
        print()


if __name__ == "__main__":
    main()

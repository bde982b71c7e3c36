"""``omni-connector serve`` as a process, and what tests ask it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

CONNECTOR = os.environ.get("SERVE_TEST_CONNECTOR", "shared_memory")
TESTS = Path(__file__).parent
DEADLINE_S = 60.0
T = TypeVar("T")


def eventually(ask: Callable[[], T], wanted: Callable[[T], Any] = bool, within_s: float = DEADLINE_S) -> T:
    """Ask again and again until the answer is the wanted one."""
    deadline = time.monotonic() + within_s
    while not wanted(answer := ask()):
        assert time.monotonic() < deadline, f"still {answer!r} after {within_s} s"
        time.sleep(0.01)
    return answer


class Server:
    """A running server; `folder` is where its stages look for what they wait for."""

    def __init__(self, process: subprocess.Popen[str], url: str, folder: Path) -> None:
        self.process = process
        self.url = url
        self.folder = folder
        self.client = httpx.Client(base_url=url, timeout=DEADLINE_S)
        self._threads = ThreadPoolExecutor(16)

    def generate(self, text: str = "x", **body: Any) -> httpx.Response:
        return self.client.post("/v1/generate", json={"text": text, **body})

    def start(self, text: str = "x", **body: Any) -> Future[httpx.Response]:
        return self._threads.submit(self.generate, text, **body)

    def open(self, name: str) -> None:
        """Let whoever waits for `name` go on."""
        (self.folder / name).touch()

    def entered(self, name: str) -> None:
        """Wait until a stage has said so."""
        eventually((self.folder / name).exists)

    def health(self) -> httpx.Response:
        return self.client.get("/health")

    def healthy(self) -> None:
        eventually(lambda: self.health().status_code, lambda status: status == 200)

    def stage(self, name: str, replica: int = 0) -> dict[str, Any]:
        stages = {stage["stage"]: stage for stage in self.client.get("/v1/stages").json()["stages"]}
        return {**stages[name], **stages[name]["replicas"][replica]}

    def samples(self) -> list[Sample]:
        """Read all metrics."""
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        return [sample for family in families for sample in family.samples]

    def metric(self, name: str, **labels: str) -> float:
        return total(self.samples(), name, **labels)

    def at_rest(self) -> None:
        """Wait until no stage has anything, and no connector holds anything."""
        gauges = ("omni_serve_requests_running", "omni_connector_pending", "omni_connector_bytes_held")

        def held() -> dict[str, float]:
            samples = self.samples()
            return {gauge: total(samples, gauge) for gauge in gauges}

        eventually(held, lambda held: not any(held.values()), within_s=20)
        for stage in self.client.get("/v1/stages").json()["stages"]:
            assert [replica["request_id"] for replica in stage["replicas"]] == [None] * len(stage["replicas"])

    def workers(self) -> set[int]:
        return set(children(self.process.pid))

    def close(self) -> str:
        """SIGTERM, and the rest of the output."""
        self.client.close()
        self._threads.shutdown()
        self.process.send_signal(signal.SIGTERM)
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        return output


def total(samples: Iterable[Sample], name: str, **labels: str) -> float:
    """Add up the samples of that name and labels."""
    return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    with contextlib.suppress(FileNotFoundError):
        return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pipeline_of(
    *names: str, folder: Path, stages: Mapping[str, Any] = {}, serve: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """Describe a chain of `Actor` stages."""
    described = [
        {
            "stage_id": name,
            "class": "acting_stages:Actor",
            "timeout_s": 30,
            **stages.get(name, {}),
            "options": {"folder": str(folder), **stages.get(name, {}).get("options", {})},
        }
        for name in names
    ]
    return {
        "pipeline": "acting",
        "connector": {"type": CONNECTOR},
        "stages": described,
        "edges": [{"from": a, "to": b} for a, b in itertools.pairwise(names)],
        "serve": {"port": 0, **serve},
    }


def start(pipeline: Mapping[str, Any] | Path, folder: Path) -> Server:
    """Start a server and return once it listens."""
    if isinstance(pipeline, Path):
        path = pipeline
    else:
        path = folder / "pipeline.yaml"
        path.write_text(yaml.safe_dump(dict(pipeline)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, "-m", "omni_connector_serve", "serve", str(path), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**env, "XDG_RUNTIME_DIR": str(runtime_folder(folder))},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on "), line
    return Server(process, line.removeprefix("listening on ").strip(), folder)


def runtime_folder(folder: Path) -> Path:
    """Where a server keeps its sockets: a folder of the test's own, so that a test sees what is left there."""
    path = folder / "run"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@contextlib.contextmanager
def served(pipeline: Mapping[str, Any] | Path, folder: Path) -> Iterator[Server]:
    """Run a server, ready for requests, and stop it at the end, by force if it must be."""
    server = start(pipeline, folder)
    try:
        server.healthy()
        yield server
        assert server.close().endswith("stopped\n")
        assert server.process.returncode == 0
    finally:
        server.process.kill()
        server.process.wait()


def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """Read server-sent events."""
    event = ""
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
        elif name == "data":
            yield event, json.loads(value)

# SPDX-License-Identifier: Apache-2.0
"""Start `vllm serve MODEL --omni`, ask it for audio, watch its log, and stop it with nothing left behind."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import wave
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

from omni_connector_contract_tests.harness.two_hosts import ADDRESS, TwoHosts

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
STATS_INTERVAL_S = 0.1
"""How often a server reports its connectors' counters."""
DEPLOYS = Path(__file__).parent / "deploy"
UPSTREAM_DEPLOYS = Path(sysconfig.get_path("purelib")) / "vllm_omni" / "deploy"  # importing it takes seconds
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "OMP_NUM_THREADS": "1",
    "OMNI_CONNECTOR_STATS_INTERVAL_S": str(STATS_INTERVAL_S),
}
AUDIO = {
    "two": ("12906c713f747e57", "e0a2fc23572044f4"),
    "two chunks": ("cf72a87d28dbd3a0", "080176a079747721"),
    "three": ("d6404dc84180ebb0", "6dc93a7a4b9d68f2"),
    "three chunks": ("34f537bb596d0a7e", "256124e844073418"),
    "kv": ("29b11f78d6febb0f", "41f249841ff6b0bd"),
    "experts": ("196ba2500b4b4432", "f913d052efd9b441"),
}
"""Hashes of the audio of "hello 0" and "hello 1", by deploy file, measured with vLLM-Omni's own SharedMemoryConnector."""

# One process a stage; unset, the layout of a GPU machine (an engine process and a worker process a stage).
ONE_PROCESS_A_STAGE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Stages and workers are forked from a process that has imported everything, where a start would take a minute and more. Each
# layout has a server that starts as it does on a GPU machine: TestChunks, TestHeadAndHeadless and test_vllm_two_hosts.py.
FORKED = {"OMNI_CPU_RIG_FORK": "1"}


@dataclass(frozen=True)
class Reply:
    """The answer to one chat request.

    Attributes
    ----------
    status
        HTTP status.
    seconds
        From the request to the end of the body.
    text, frames, sha256
        The text; the audio's length in samples and the first 16 hexadecimal digits of the hash of its samples.
    error
        The body, when the status is not 200.
    """

    status: int
    seconds: float
    text: str = ""
    frames: int = 0
    sha256: str = ""
    error: str = ""


_MOVES = (("producer", "puts"), ("consumer", "gets"))


def write_deploy(
    path: Path, base: str, changes: Mapping[str, Any] | None = None, *, upstream: str | None = None
) -> Path:
    """Write a deploy file made from one in ``deploy/``.

    Parameters
    ----------
    path
        Where to write it.
    base
        Name of a file in ``deploy/``, without its suffix.
    changes
        Dotted path -> value; a number selects a stage: ``{"async_chunk": True, "stages.0.devices": "1"}``.
    upstream
        Name of a deploy file that vllm-omni brings: its connectors, and who uses them, are taken in place of ours.
    """
    deploy = yaml.safe_load((DEPLOYS / f"{base}.yaml").read_text())
    if upstream is not None:
        deploy = _on_cpu(yaml.safe_load((UPSTREAM_DEPLOYS / f"{upstream}.yaml").read_text()), deploy)
    for dotted, value in (changes or {}).items():
        *parents, last = dotted.split(".")
        node = deploy
        for name in parents:
            node = node[int(name)] if isinstance(node, list) else node.setdefault(name, {})
        node[last] = value
    # Starting stages wait for each other where they have a device in common, also those of another server.
    first = 8 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for stage in deploy["stages"]:
        stage["devices"] = ",".join(str(first + int(device)) for device in stage["devices"].split(","))
    path.write_text(yaml.safe_dump(deploy, sort_keys=False))
    return path


def _on_cpu(upstream: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """One of vllm-omni's deploy files, with our pipeline and what a stage needs on a CPU; its connectors stay as they are."""
    stages = [
        {**theirs, **{name: value for name, value in mine.items() if not name.endswith("_connectors")}}
        for theirs, mine in zip(upstream["stages"], ours["stages"], strict=True)
    ]
    return {**ours, "async_chunk": upstream["async_chunk"], "connectors": upstream["connectors"], "stages": stages}


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stats_of(lines: Iterable[str], backend: str, edge: str, role: str) -> Counter[str]:
    """Add up the last counters in each process's log lines for one end of an edge."""
    pattern = re.compile(rf"connector stats: pid=(\d+) backend={backend} edge={edge} role={role} (.*)")
    last = {match[1]: match[2] for line in lines if (match := pattern.search(line))}
    total: Counter[str] = Counter()
    for counters in last.values():
        for name, _, value in (part.rpartition("=") for part in counters.split()):
            total[name] += int(value)
    return total


def wait_until(condition: Callable[[], bool], timeout: float, otherwise: str) -> None:
    """Wait for something that only asking can tell, looking twenty times a second."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, otherwise
        threading.Event().wait(0.05)


def engines_of(server: Process | Server, stage: int) -> list[psutil.Process]:
    """The engine processes of a stage, one a replica."""
    return [process for process in server.tree() if f"stage{stage}_replica" in process.name()]


def engine_of(server: Process | Server, stage: int, replica: int = 0) -> psutil.Process:
    """The engine process of a replica of a stage."""
    [engine] = [engine for engine in engines_of(server, stage) if f"_replica{replica}" in engine.name()]
    return engine


class Process:
    """One `vllm serve` whose output is kept and can be waited for."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._lines: list[str] = []
        self._grew = threading.Condition()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **environment},
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"read {log.name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self.log.open("w") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                with self._grew:
                    self._lines.append(line.rstrip("\n"))
                    self._grew.notify_all()
        with self._grew:
            self._grew.notify_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def say_no_more(self) -> None:
        """Close its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def lines(self) -> list[str]:
        """Everything printed so far."""
        with self._grew:
            return list(self._lines)

    def wait_for(self, pattern: str, timeout: float) -> re.Match[str]:
        """Wait until a line matches; a process that ends first fails with the end of its log."""
        deadline = time.monotonic() + timeout
        seen = 0
        with self._grew:
            while True:
                while seen < len(self._lines):
                    if match := re.search(pattern, self._lines[seen]):
                        return match
                    seen += 1
                if self._process.poll() is not None or time.monotonic() > deadline:
                    tail = "\n".join(self._lines[-60:])
                    raise AssertionError(f"no line like {pattern!r} in {self.log}; it ends:\n{tail}")
                self._grew.wait(min(1.0, max(0.0, deadline - time.monotonic())))

    def wait(self, timeout: float) -> int:
        """Wait for its end; returns the exit status."""
        status = self._process.wait(timeout)
        self._reader.join(timeout=10)
        return status

    def tree(self) -> list[psutil.Process]:
        """The process and its descendants."""
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def terminate(self) -> list[psutil.Process]:
        """Tell it to stop, as an operator does; returns the process and its descendants."""
        family = self.tree()
        for process in family:
            if process.name() != "nsenter":  # which takes a command to a host, but no signal
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGTERM)
                break
        return family

    def join(self, family: list[psutil.Process]) -> list[psutil.Process]:
        """Wait for its end; kill and return what is still there afterwards."""
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _, left = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._reader.join(timeout=10)
        return left


class Server:
    """A running server: a head, and any stages that run headless in processes of their own.

    Parameters
    ----------
    deploy
        The deploy file.
    model
        A checkpoint by ``omni_cpu_rig.checkpoint``.
    directory
        Logs go here.
    headless
        Ids of stages that get a `vllm serve --headless` of their own.
    hosts
        Two hosts to serve on: the stages of even number, with the head, on one, those of odd number on the other.
    arguments
        More of `vllm serve`'s arguments.
    environment
        Added to the environment of every process.
    """

    def __init__(
        self,
        deploy: Path,
        model: Path,
        directory: Path,
        *,
        headless: Sequence[int] = (),
        hosts: TwoHosts | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.directory = directory
        self._hosts = hosts
        self.left_behind: list[psutil.Process] = []
        directory.mkdir(parents=True, exist_ok=True)
        vllm = str(Path(sys.executable).parent / "vllm")
        common = [vllm, "serve", str(model), "--omni", "--deploy-config", str(deploy), "--served-model-name", "tiny"]
        common += ["--host", "127.0.0.1", "--port", str(self.port), *arguments]
        address = "127.0.0.1" if hosts is None else ADDRESS["a"]
        master = ["--omni-master-address", address, "--omni-master-port", str(free_port())] if headless else []
        head = [*common, *master, *(["--stage-id", "0"] if headless else [])]
        commands = {"head": (0, head)} | {
            f"stage{stage}": (stage, [*common, *master, "--headless", "--stage-id", str(stage)]) for stage in headless
        }
        self.processes = {
            name: Process(
                [*([] if hosts is None else hosts.prefix("b" if stage % 2 else "a")), *command],
                environment or {},
                directory / f"{name}.log",
            )
            for name, (stage, command) in commands.items()
        }

    def __enter__(self) -> Self:
        try:
            self.head.wait_for("Application startup complete", READY_TIMEOUT_S)
            wait_until(self._listens, 60, "the server does not listen")  # uvicorn binds just after that line
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _listens(self) -> bool:
        try:
            self._connect().close()
        except (OSError, RuntimeError):
            return False
        return True

    def _connect(self) -> socket.socket:
        if self._hosts is None:
            return socket.create_connection(("127.0.0.1", self.port))
        return self._hosts.connect("a", self.port)

    @contextlib.contextmanager
    def _http(self, timeout: float) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.sock = self._connect()
        connection.sock.settimeout(timeout)
        try:
            yield connection
        finally:
            connection.close()

    @property
    def head(self) -> Process:
        return self.processes["head"]

    def stop(self) -> None:
        """Stop every process; ``left_behind`` then holds those that did not end by themselves."""
        families = [(process, process.terminate()) for process in self.processes.values()]
        for process, family in families:
            self.left_behind += process.join(family)

    def lines(self) -> list[str]:
        """Every process's log lines so far."""
        return [line for process in self.processes.values() for line in process.lines()]

    def stats(self, backend: str, edge: str, role: str) -> Counter[str]:
        """Add up the last counters that each process logged for one end of an edge."""
        return stats_of(self.lines(), backend, edge, role)

    def tree(self) -> list[psutil.Process]:
        """Every process of the server."""
        return [member for process in self.processes.values() for member in process.tree()]

    def assert_serves(self, audio: str, edges: Mapping[str, str], *, drop_in: bool = False) -> None:
        """Two requests give the audio, every edge's counters move, and the built-in connector is not there.

        Parameters
        ----------
        audio
            A key of `AUDIO`.
        edges
            Edge -> backend.
        drop_in
            Whether the backend goes by the built-in connector's name.
        """
        ends = [(backend, edge, *what) for edge, backend in edges.items() for what in _MOVES]
        before = {end: self.stats(*end[:3])[end[3]] for end in ends}
        replies = [self.chat(f"hello {number}") for number in range(2)]
        assert [reply.error for reply in replies] == ["", ""]
        assert [reply.sha256 for reply in replies] == list(AUDIO[audio])
        for end in ends:
            wait_until(
                lambda end=end: self.stats(*end[:3])[end[3]] >= before[end] + 2,
                60,
                f"the counters of {end} do not move",
            )
        assert drop_in or not [line for line in self.lines() if "Created connector: SharedMemoryConnector" in line]

    def assert_hung_up_requests_send_nothing(self, audio: str, edges: Mapping[str, str]) -> None:
        """Of requests whose clients hang up while the first stage is at work nothing is put, unlike of the two after them."""
        first = next(iter(edges))
        before = self._settled_puts(edges[first], first)
        for _ in range(4):
            with self.held():
                pass
        self.assert_serves(audio, edges)
        assert self._settled_puts(edges[first], first) == before + 2

    def _settled_puts(self, backend: str, edge: str) -> int:
        """How many puts an edge has had, once the reports of three intervals in a row say the same."""
        seen: list[tuple[float, int]] = []

        def settled() -> bool:
            now, puts = time.monotonic(), self.stats(backend, edge, "producer")["puts"]
            if not seen or seen[0][1] != puts:
                seen[:] = [(now, puts)]
            return now - seen[0][0] > 3 * STATS_INTERVAL_S

        wait_until(settled, 60, "the counters do not come to rest")
        return seen[0][1]

    def assert_memory_returns(self, edge: str, backend: str) -> None:
        """Everything that was put gets read or dropped."""
        wait_until(lambda: not self.stats(backend, edge, "producer")["pending"], 60, "unread payloads stay")

    @contextlib.contextmanager
    def request(self, text: str, *, timeout: float = 120.0, **body: Any) -> Iterator[http.client.HTTPConnection]:
        """Send a chat request and yield the connection; leaving the block hangs up, answered or not."""
        messages = [{"role": "user", "content": text}]
        body = {"model": "tiny", "messages": messages, "modalities": ["text", "audio"], **body}
        with self._http(timeout) as connection:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            yield connection

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Send a request that the first stage cannot end; inside the block it is in its middle, leaving it hangs up."""
        with self.request("~", stream=True) as held:
            assert held.getresponse().readline()  # the first word
            yield

    def chat(self, text: str, **kwargs: Any) -> Reply:
        """Send a chat request and wait for its answer."""
        start = time.monotonic()
        with self.request(text, **kwargs) as connection:
            response = connection.getresponse()
            answer = response.read()
        seconds = time.monotonic() - start
        if response.status != http.HTTPStatus.OK:
            return Reply(response.status, seconds, error=answer.decode(errors="replace"))
        messages = [choice["message"] for choice in json.loads(answer)["choices"]]
        text = "".join(message.get("content") or "" for message in messages)
        for message in messages:
            if audio := message.get("audio"):
                with wave.open(io.BytesIO(base64.b64decode(audio["data"]))) as wav:
                    samples = wav.readframes(wav.getnframes())
                    digest = hashlib.sha256(samples).hexdigest()[:16]
                    return Reply(response.status, seconds, text, wav.getnframes(), digest)
        return Reply(response.status, seconds, text)

    def seconds_to_first_audio(self, text: str, **kwargs: Any) -> float:
        """Send a streaming chat request, take its answer to the end, and return when its first audio came."""
        start = time.monotonic()
        first = None
        with self.request(text, stream=True, **kwargs) as connection:
            for line in connection.getresponse():
                if first is None and line.startswith(b"data: ") and b'"audio"' in line:
                    first = time.monotonic() - start
        assert first is not None, "the stream ended without audio"
        return first

    def health(self) -> int:
        """Status of GET /health."""
        with self._http(60) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status

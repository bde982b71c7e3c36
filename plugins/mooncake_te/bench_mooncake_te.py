"""Ratios of this backend to the bare Transfer Engine, and to vllm-omni's connector over it, interleaved in one run.

python plugins/mooncake_te/bench_mooncake_te.py [--upstream PYTHON_THAT_HAS_VLLM_OMNI]

Two processes, TCP over loopback. ``get`` is the consumer's call for a payload that is there, its metadata given, decoding included;
bare is the same number of bytes by the fastest of the SDK's own calls. What issue 4 asks for is in parentheses.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mooncake
import numpy as np

from omni_connector_core import Role, create_connector
from omni_connector_core.arena import HostMemory
from omni_connector_core.services import free_ports
from omni_connector_mooncake_te.engine import MooncakeEngine, TransferEngine

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "16 MB": 1 << 24, "256 MB": 1 << 28}
NBYTES = 1 << 28
CONFIG = {"capacity_bytes": "700MiB"}
UPSTREAM = Path(".venv-vllm/bin/python")


def serve(namespace: str, pipe: Connection) -> None:
    """Be the producer: of a bare engine and of a connector."""
    memory = HostMemory(NBYTES)
    bare = np.frombuffer(memory.part(0, NBYTES), np.uint8)
    bare[:] = 1
    engine = MooncakeEngine("127.0.0.1", "tcp", "")
    engine.register(memory.address, NBYTES)
    pipe.send((memory.address, engine.endpoint(memory.address)))
    with create_connector("mooncake_te", CONFIG, role=Role.PRODUCER, namespace=namespace) as conn:
        source = np.ones(NBYTES, np.uint8)
        while (order := pipe.recv()) is not None:
            if order == "cpu":
                pipe.send(time.process_time())
                continue
            key, nbytes = order
            if key is None:
                np.copyto(bare[:nbytes], source[:nbytes])
                pipe.send(None)
                continue
            start_s = time.perf_counter()
            metadata = conn.put(key, {"x": source[:nbytes]})
            pipe.send((start_s, time.perf_counter() - start_s, metadata))
        engine.close()


class Bare:
    """The SDK's own calls."""

    def __init__(self, remote: int, blob: bytes) -> None:
        self.memory = HostMemory(NBYTES)
        np.frombuffer(self.memory.part(0, NBYTES), np.uint8)[:] = 0
        ours = MooncakeEngine("127.0.0.1", "tcp", "")
        ours.register(self.memory.address, NBYTES)
        self.session, self.remote = ours.connect(blob), remote
        self.engine: TransferEngine = ours._engine
        self.kept = ours

    def sync(self, nbytes: int) -> None:
        """Read by the call that spins."""
        assert not self.engine.transfer_sync_read(self.session, self.memory.address, self.remote, nbytes)

    def polled(self, nbytes: int, pause_s: float) -> None:
        """Read by the call that is polled."""
        batch = self.engine.batch_transfer_async_read(self.session, [self.memory.address], [self.remote], [nbytes])
        while (status := self.engine.transfer_check_status(batch)) == 0:
            if pause_s:
                time.sleep(pause_s)
        assert status == 1

    def ways(self) -> dict[str, Callable[[int], None]]:
        """Every way to do it."""
        return {
            "sync": self.sync,
            "polled": lambda nbytes: self.polled(nbytes, 0.0),
            "polled every 50 us": lambda nbytes: self.polled(nbytes, 50e-6),
            "polled every 1 ms": lambda nbytes: self.polled(nbytes, 1e-3),
        }


def timed(call: Callable[..., Any], *args: Any) -> float:
    """Return the seconds a call takes."""
    start_s = time.perf_counter()
    call(*args)
    return time.perf_counter() - start_s


def compare(pipe: Connection, bare: Bare, namespace: str, upstream: Any) -> None:
    """Measure every size."""
    with create_connector("mooncake_te", CONFIG, role=Role.CONSUMER, namespace=namespace) as conn:
        for size, nbytes in SIZES.items():
            rounds = 12 if nbytes > 1 << 24 else 30 if nbytes > 1 << 20 else 200
            times: dict[str, list[float]] = {}
            for n in range(rounds):
                for name, way in bare.ways().items():
                    pipe.send((None, nbytes))  # a put has just written what is then read: so it is here
                    pipe.recv()
                    times.setdefault(name, []).append(timed(way, nbytes))
                pipe.send((f"{size}-{n}".replace(" ", ""), nbytes))
                _, put_s, metadata = pipe.recv()
                start_s = time.perf_counter()
                payload = conn.get(f"{size}-{n}".replace(" ", ""), metadata)
                get_s = time.perf_counter() - start_s
                times.setdefault("get", []).append(get_s)
                times.setdefault("put + get", []).append(put_s + get_s)
                del payload
                if upstream is not None:
                    times.setdefault("upstream", []).append(upstream(f"{size}-{n}".replace(" ", ""), nbytes))
            best = {name: statistics.median(values[2:]) * 1e6 for name, values in times.items()}
            if "-v" in sys.argv:
                print({name: (round(min(v[2:]) * 1e6), round(best[name])) for name, v in times.items()})
            way = min(bare.ways(), key=lambda name: best[name])
            line = f"{size:>7}  get {best['get']:9.0f} us, {best[way] / best['get']:.2f} of bare, {way} (0.9 from 1 MB)"
            line += f"   put + get {best['put + get']:9.0f} us" + (" (400)" if nbytes == 1 << 10 else "")
            if upstream is not None:
                line += f"   {best['upstream'] / best['put + get']:.2f} x vllm-omni's (1.3 from 16 MB)"
            print(line, flush=True)
        cpu(pipe, conn)


def cpu(pipe: Connection, conn: Any) -> None:
    """Measure the processor time of both ends while they are idle and while 256 MB move."""
    for what, rounds in (("idle", 0), ("256 MB", 8)):
        keys = []
        for n in range(rounds and 2):
            pipe.send((f"{what}{n}", NBYTES))
            keys.append((f"{what}{n}", pipe.recv()[2]))
        pipe.send("cpu")
        theirs_s, ours_s, start_s = pipe.recv(), time.process_time(), time.perf_counter()
        for key, metadata in keys:
            conn.get(key, metadata)
        if not keys:
            time.sleep(2)
        took_s = time.perf_counter() - start_s
        ours_s = time.process_time() - ours_s
        pipe.send("cpu")
        theirs_s = pipe.recv() - theirs_s
        print(f"{what}: consumer {ours_s / took_s:.2f} cores (0.6), producer {theirs_s / took_s:.2f} cores", flush=True)


@contextmanager
def upstream_pair(python: Path | None) -> Iterator[Callable[[str, int], float] | None]:
    """Start both ends of vllm-omni's connector; yields a function that returns the seconds of a put and a get."""
    if python is None:
        yield None
        return
    port = free_ports(2)[0]
    script = Path(__file__).with_name("bench_upstream.py")
    site = Path(mooncake.__file__).parents[1]
    ends = {
        role: subprocess.Popen(
            [python, script, site, role, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for role in ("producer", "consumer")
    }

    def ask(role: str, line: str = "") -> Any:
        end = ends[role]
        assert end.stdin is not None
        assert end.stdout is not None
        if line:
            end.stdin.write(line + "\n")
            end.stdin.flush()
        while not (answer := end.stdout.readline()).startswith(('"', "[")):
            assert answer, f"the {role} of vllm-omni ended"
        return json.loads(answer)

    def transfer(key: str, nbytes: int) -> float:
        put_s, metadata = ask("producer", f"put {key} {nbytes}")
        get_s, _ = ask("consumer", f"get {key} {json.dumps(metadata)}")
        return float(put_s + get_s)

    try:
        for role in ends:
            assert ask(role) == "ready"
        yield transfer
    finally:
        for end in ends.values():
            end.kill()
            end.wait()


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser()
    default = UPSTREAM if UPSTREAM.exists() else None
    parser.add_argument("--upstream", type=Path, default=default, help="a Python that can import vllm_omni")
    arguments, _ = parser.parse_known_args()
    namespace = f"bench-te-{time.time_ns()}"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=serve, args=(namespace, theirs))
    child.start()
    bare = Bare(*ours.recv())
    with upstream_pair(arguments.upstream) as upstream:
        compare(ours, bare, namespace, upstream)
    ours.send(None)
    child.join()
    bare.kept.close()


if __name__ == "__main__":
    os.environ.setdefault("GLOG_minloglevel", "2")
    sys.exit(main())

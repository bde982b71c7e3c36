"""What the operating system sees: users, mounts, files, system calls, CPU time."""

from __future__ import annotations

import array
import collections
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import pytest
from shared_memory_edge import Edge, eventually, produce, spawn

from omni_connector_core import OmniConnector, Role, create_connector
from omni_connector_core.errors import BackendUnavailableError, OmniConnectorError

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
with_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@pytest.fixture
def edge(tmp_path: Path) -> Edge:
    return Edge(tmp_path / "run")


# ---- other users


def get_as_nobody(pipe: Connection, runtime_dir: str, namespace: str) -> None:
    with create_connector("shared_memory", {"runtime_dir": runtime_dir}, namespace=namespace) as conn:
        os.setuid(NOBODY)
        try:
            pipe.send(conn.get("secret", timeout=1))
        except OmniConnectorError as error:
            pipe.send(error)


def connect_as_nobody(pipe: Connection, path: str) -> None:
    os.setuid(NOBODY)
    os.chdir(os.path.dirname(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(os.path.basename(path))
        fds = array.array("i")
        message, ancillary, _, _ = sock.recvmsg(4096, socket.CMSG_SPACE(4 * fds.itemsize))
        pipe.send((message, len(ancillary)))


def let_anybody_in(folder: Path) -> None:
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid():
            parent.chmod(parent.stat().st_mode | 0o011)


@as_root
def test_another_user_is_told_that_permission_is_denied(edge: Edge, tmp_path: Path) -> None:
    let_anybody_in(tmp_path)
    ours, theirs = spawn.Pipe()
    with edge.open(Role.PRODUCER) as producer:
        producer.put("secret", 1)
        process = spawn.Process(target=get_as_nobody, args=(theirs, str(edge.folder), edge.namespace))
        process.start()
        assert ours.poll(30)
        error = ours.recv()
        process.join()
    assert isinstance(error, BackendUnavailableError)
    assert "permission denied" in str(error)


@as_root
def test_another_user_gets_no_memory_even_where_the_folder_is_open(edge: Edge) -> None:
    ours, theirs = spawn.Pipe()
    with edge.open(Role.PRODUCER) as producer:
        producer.put("secret", 1)
        [path] = edge.folder.glob("*.sock")
        let_anybody_in(edge.folder)
        path.chmod(0o777)
        process = spawn.Process(target=connect_as_nobody, args=(theirs, str(path)))
        process.start()
        assert ours.poll(30)
        message, count = ours.recv()
        process.join()
        assert b"runs as user 0" in message
        assert count == 0
        with edge.open(Role.CONSUMER) as consumer:
            assert consumer.get("secret") == 1


def test_a_folder_that_others_may_write_to_is_refused(edge: Edge) -> None:
    edge.folder.mkdir()
    edge.folder.chmod(0o777)
    with edge.open() as conn, pytest.raises(BackendUnavailableError, match="other users may write"):
        conn.put("k", 1)


# ---- strangers on the socket


def test_random_bytes_on_the_socket_harm_nobody(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    with edge.open(Role.PRODUCER) as producer, edge.open(Role.CONSUMER) as consumer:
        producer.put("k", 1)
        assert consumer.exists(["k"]) == [True]
        [path] = edge.folder.glob("*.sock")
        monkeypatch.chdir(edge.folder)
        before = psutil.Process().num_fds()
        rng = random.Random(7)
        for n in range(300):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(path.name)
                # half of them begin like a message of ours
                start = bytes([0x90 + rng.randrange(16), rng.randrange(32)]) if n % 2 else b""
                sock.send(start + rng.randbytes(rng.randrange(1, 200)))
        assert consumer.get("k") == 1
        assert eventually(lambda: psutil.Process().num_fds() <= before)
        assert producer.health().ok


# ---- memory and mounts

IN_A_SMALL_TMPFS = """
import numpy as np, pytest
from omni_connector_core import create_connector
from omni_connector_core.errors import CapacityError
with create_connector("shared_memory", {"pool_dir": "/mnt", "runtime_dir": "/mnt/run"}, namespace="n") as conn:
    with pytest.raises(CapacityError, match="No space left"):
        conn.put("large", np.ones(2 << 20, np.uint8), timeout=0.1)
    conn.put("small", np.ones(300_000, np.uint8))
    assert conn.get("small").all()
"""
WITH_A_SMALL_DEV_SHM = """
import numpy as np
from omni_connector_core import create_connector
with create_connector("shared_memory", {"runtime_dir": "/mnt/run"}, namespace="n") as conn:
    conn.put("large", np.ones(200 << 20, np.uint8))
    assert conn.get("large").all()
"""


def mounted(mount: str, script: str) -> None:
    """Run a script where a tmpfs is mounted that only it sees."""
    command = f"mount -t tmpfs {mount} && exec {sys.executable} -c '{script}'"
    unshare = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this host lets nobody make a mount namespace")
    done = subprocess.run([*unshare, "sh", "-c", command], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_full_tmpfs_is_a_capacity_error() -> None:
    mounted("-o size=1m pool /mnt", IN_A_SMALL_TMPFS)


def test_a_small_dev_shm_does_not_matter() -> None:
    mounted("-o size=64m shm /dev/shm && mount -t tmpfs -o size=1m run /mnt", WITH_A_SMALL_DEV_SHM)


# ---- what a transfer costs


def transfers(conn: OmniConnector, pipe: Connection) -> None:
    """Get what is announced; twice as many rounds as are counted."""
    while (keys := pipe.recv()) is not None:
        for key in keys:
            pipe.send("waiting")
            conn.get(key)


def traced(pid: int, log: Path) -> subprocess.Popen[str]:
    tracer = subprocess.Popen(["strace", "-f", "-p", str(pid), "-o", str(log)], stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    assert "attached" in tracer.stderr.readline()
    return tracer


def calls_of(log: Path, thread: int | None = None) -> collections.Counter[str]:
    """Count the system calls of one thread, or of all."""
    lines = (line.split(maxsplit=1) for line in log.read_text().splitlines())
    names = (re.match(r"(\w+)\(", rest) for number, rest in lines if thread in (None, int(number)))
    return collections.Counter(match[1] for match in names if match)


@with_strace
def test_a_put_costs_one_system_call_or_two(edge: Edge, tmp_path: Path) -> None:
    count = 50
    log = tmp_path / "producer"
    with edge.peer(put_when_told, Role.PRODUCER) as (orders, producer), edge.open(Role.CONSUMER) as consumer:
        orders.send("warm")
        assert consumer.get("warm") is not None
        assert producer.pid is not None
        tracer = traced(producer.pid, log)
        for n in range(count):
            handle = consumer.submit_get(f"k{n}")
            assert not handle.done()
            orders.send(f"k{n}")
            handle.result(20)
        tracer.terminate()
        tracer.wait()
        calls = calls_of(log, producer.pid)
        # one look for questions and one answer, unless the server's thread was just about it
        assert calls["epoll_wait"] <= count
        assert calls["sendto"] <= count
        assert count <= calls_of(log)["sendto"] <= 2 * count
        # what else there is comes from the pipe that tells it what to put, and from locks
        others = {
            name: n for name, n in calls.items() if name not in ("sendto", "epoll_wait", "read", "futex", "getpid")
        }
        assert sum(others.values()) < count / 5, others


def put_when_told(conn: OmniConnector, pipe: Connection) -> None:
    payload = np.ones(1000, np.uint8)
    while True:
        try:
            conn.put(pipe.recv(), payload)
        except EOFError:
            return


def be_idle(conn: OmniConnector, pipe: Connection) -> None:
    conn.put("k", 1)
    pipe.recv()


def switches(pid: int) -> int:
    """How often the threads of a process have been given a CPU."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        total += sum(int(line.split()[1]) for line in status.read_text().splitlines() if "ctxt_switches" in line)
    return total


def test_an_idle_connector_does_nothing_at_all(edge: Edge) -> None:
    with edge.peer(be_idle, Role.PRODUCER) as (pipe, producer), edge.open(Role.CONSUMER) as consumer:
        assert consumer.get("k") == 1
        assert producer.pid is not None
        assert eventually(lambda: still(producer.pid))
        pipe.send("stop")


def still(pid: int | None) -> bool:
    assert pid is not None
    before = switches(pid)
    time.sleep(1.0)  # what is measured is that nothing happens
    return switches(pid) == before


def test_closing_leaves_nothing_open(edge: Edge) -> None:
    def open_and_close() -> None:
        with edge.open(Role.PRODUCER) as producer, edge.open(Role.CONSUMER) as consumer:
            producer.put("k", np.ones(1000))
            consumer.get("k")
            assert consumer.poll("other") is not None

    open_and_close()
    process = psutil.Process()
    fds, threads, files = process.num_fds(), process.num_threads(), edge.files()
    for _ in range(5):
        open_and_close()
    # fewer is no leak: a thread that was joined, then as now, is gone for Python a moment before it is for the kernel
    assert eventually(lambda: process.num_fds() <= fds and process.num_threads() <= threads and edge.files() == files)


def test_a_producer_that_is_only_constructed_opens_nothing(edge: Edge) -> None:
    before = psutil.Process().num_fds()
    with edge.open():
        assert psutil.Process().num_fds() == before
        assert edge.files() == []


def test_pings_and_probes_answer(edge: Edge) -> None:
    with edge.peer(produce, Role.PRODUCER) as (pipe, _), edge.open(Role.CONSUMER) as conn:
        pipe.recv()
        assert conn.health().ok
        pipe.send(("k", 1, {}))
        pipe.recv()
        health = conn.health()
        assert health.ok
        assert "1 producers answer" in health.detail
        conn.get("k")

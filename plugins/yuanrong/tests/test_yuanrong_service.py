"""The service that tests, demos and `omni-connector services up yuanrong` start."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from omni_connector_contract_tests.harness.eventually import eventually
from omni_connector_core import create_connector
from omni_connector_yuanrong.service import start


def test_it_serves_and_leaves_nothing_behind(tmp_path):
    with start(memory="64MiB") as service:
        assert len(str(service.directory)) < 60  # a socket lies below, and 80 is the vendor's limit
        (daemon,) = service.daemons.values()
        listening = {c.laddr.ip for c in psutil.Process(daemon.pid).net_connections() if c.status == psutil.CONN_LISTEN}
        assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}
        with create_connector("yuanrong", service.config(), namespace=f"service-{os.getpid()}") as connector:
            connector.put("k", {"a": 1})
            assert connector.get("k") == {"a": 1}
        folder, pid = service.directory, daemon.pid
        assert folder.exists()
    assert not folder.exists()
    assert not psutil.pid_exists(pid)


def test_a_worker_leaves_a_processor_to_its_clients():
    """Its I/O threads spin until a request is there as a whole: on all processors they would wait for clients that do not run."""
    with start(memory="64MiB") as service:
        pid = service.daemons["worker0"].pid
        theirs = {cpu for thread in os.listdir(f"/proc/{pid}/task") for cpu in os.sched_getaffinity(int(thread))}
        assert len(theirs) == max(len(os.sched_getaffinity(0)) - 1, 1)


def test_its_workers_die_with_the_process_that_started_them():
    code = (
        "import sys\n"
        "from omni_connector_yuanrong.service import start\n"
        "service = start(memory='64MiB')\n"
        "print(service.daemons['worker0'].pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        pid = int(process.stdout.readline())
        assert psutil.pid_exists(pid)
        process.kill()
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("logs", ["client"])
def test_clients_write_no_log_while_all_is_well(logs, tmp_path):
    del logs
    code = (
        "from omni_connector_core import create_connector\n"
        "from omni_connector_yuanrong.service import start\n"
        "with start(memory='64MiB') as service, create_connector('yuanrong', service.config(), namespace='logs') as c:\n"
        "    c.put('k', b'x'); c.get('k')\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path), "XDG_RUNTIME_DIR": "/tmp"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    assert written == []

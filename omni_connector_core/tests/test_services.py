"""services: daemons start, are ready, answer, fail with their log, and never outlive their owner."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from omni_connector_core.services import DaemonSpec, Service, ServiceError, before_stop, free_ports, start_with

ECHO = """
import socket, sys
print("listening", flush=True)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    server.accept()[0].close()
"""


def listens(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=1):
        return True


def echo(port: int, **changes: object) -> DaemonSpec:
    values = {"name": "echo", "argv": [sys.executable, "-c", ECHO, str(port)], "ready": lambda: listens(port)}
    return DaemonSpec(**{**values, **changes})  # type: ignore[arg-type]


def gone(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_free_ports_are_distinct_and_bindable() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_free_ports_names_an_address_that_is_not_ours() -> None:
    with pytest.raises(ServiceError, match=r"192\.0\.2\.1"):
        free_ports(1, "192.0.2.1")


def test_a_service_runs_offers_its_options_and_leaves_nothing() -> None:
    (port,) = free_ports(1)
    with Service("demo").offer(port=port) as service:
        daemon = service.launch(echo(port))
        assert listens(port)
        assert service.config() == {"port": port}
        described = json.loads(json.dumps(service.describe()))
        assert described["daemons"]["echo"] == {"pid": daemon.pid, "running": True, "log": str(daemon.log)}
        assert daemon.tail() == "listening"
        assert len(str(service.directory)) < 60
    assert not daemon.running
    assert not service.directory.exists()
    service.stop()


def test_what_is_connected_is_let_go_while_the_daemons_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_connector_core.services._releases", [])
    (port,) = free_ports(1)
    seen = []
    before_stop(lambda: seen.append(listens(port)))
    with Service("demo") as service:
        service.launch(echo(port))
    service.stop()
    assert seen == [True]


def test_a_daemon_that_exits_at_once_is_reported_with_its_log() -> None:
    service = Service("demo")
    argv = [sys.executable, "-c", "import sys; sys.exit('port is taken')"]
    with pytest.raises(ServiceError, match=r"(?s)exited with code 1 .*port is taken"):
        service.launch(DaemonSpec(name="broken", argv=argv, ready=lambda: False))
    assert not service.directory.exists()


def test_a_daemon_that_never_becomes_ready_is_stopped() -> None:
    (port,) = free_ports(1)
    service = Service("demo")
    with pytest.raises(ServiceError, match=r"(?s)was not ready after 0.5 s.*listening"):
        service.launch(echo(port, ready=lambda: False, ready_s=0.5))
    assert gone(service.daemons["echo"].pid)


def test_a_missing_executable_is_named() -> None:
    with pytest.raises(ServiceError, match="no-such-daemon"):
        Service("demo").launch(DaemonSpec(name="x", argv=["no-such-daemon"], ready=lambda: True))


def test_a_daemon_deaf_to_sigterm_is_killed_with_its_children() -> None:
    code = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(child.pid, flush=True); signal.pause()"
    )
    service = Service("demo")
    log = service.directory / "deaf.log"
    with service:
        argv = [sys.executable, "-c", code]
        spec = DaemonSpec(name="deaf", argv=argv, ready=lambda: log.read_text(), stop_s=0.2)
        daemon = service.launch(spec)
        child = int(daemon.tail())
    assert gone(daemon.pid)
    assert gone(child)


def test_kill_suspend_resume_and_restart_on_the_same_port() -> None:
    (port,) = free_ports(1)
    with Service("demo") as service:
        first = service.launch(echo(port))
        first.suspend()
        assert first.running
        first.resume()
        first.kill()
        assert not first.running
        second = service.restart("echo")
        assert second.pid != first.pid
        assert listens(port)
        second.suspend()  # stop() must end a suspended daemon too
    assert not second.running


def test_a_daemon_outlives_the_thread_that_launched_it() -> None:
    (port,) = free_ports(1)
    with Service("demo") as service:
        thread = threading.Thread(target=service.launch, args=[echo(port)])
        thread.start()
        thread.join()
        assert not gone(service.daemons["echo"].pid, within_s=0.3)
        assert listens(port)


def test_a_daemon_dies_with_a_killed_owner(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    code = (
        "import signal\n"
        "from test_services import Service, echo\n"
        f"service = Service('demo'); print(service.launch(echo({port})).pid, flush=True); signal.pause()"
    )
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert psutil.pid_exists(pid)
        owner.send_signal(signal.SIGKILL)
    assert gone(pid)


def test_settings_from_a_command_line_reach_the_start():
    def start(*, mode="client", ports=None, size="1GiB"):
        return mode, ports, size

    assert start_with(start, ["mode=shared", "ports=[1, 2]", "size=2GiB"]) == ("shared", [1, 2], "2GiB")
    assert start_with(start, []) == ("client", None, "1GiB")
    for unknown in ("mod=shared", "mode"):
        with pytest.raises(ServiceError, match=r"is no setting of this service; it has mode=, ports=, size="):
            start_with(start, [unknown])

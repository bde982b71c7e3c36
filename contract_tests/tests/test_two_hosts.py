"""The two-host harness does to the network what it says."""

import subprocess
import sys

import pytest

from omni_connector_contract_tests.harness.eventually import eventually
from omni_connector_contract_tests.harness.two_hosts import ADDRESS, TwoHosts, why_not

SERVE = """
import socket
with socket.create_server(("10.77.0.1", 4711)) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        connection.sendall(b"x" * 1_000_000)
        connection.close()
"""

FETCH = """
import socket
with socket.create_connection(("10.77.0.1", 4711), timeout=1) as connection:
    total = 0
    while got := connection.recv(1 << 16):
        total += len(got)
print(total)
"""


@pytest.fixture(scope="module")
def hosts():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with TwoHosts() as made:
        server = subprocess.Popen([*made.prefix("a"), sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "ready\n"
        yield made
        server.kill()
        server.wait()
        server.stdout.close()


def fetch(hosts):
    return int(hosts.run("b", sys.executable, "-c", FETCH))


def test_bytes_cross_the_cable(hosts):
    before = hosts.received_bytes("b")
    assert fetch(hosts) == 1_000_000
    assert hosts.received_bytes("b") - before > 1_000_000
    assert ADDRESS["a"] in hosts.run("a", "ip", "-4", "addr", "show", "eth0")


@pytest.mark.parametrize("fault", ["cut", "blackhole", "reset"])
def test_nothing_crosses_until_it_is_healed(hosts, fault):
    with getattr(hosts, fault)(), pytest.raises(RuntimeError):
        fetch(hosts)
    assert fetch(hosts) == 1_000_000


def test_loss_is_survived_by_tcp(hosts):
    with hosts.loss(10):
        hosts.run("b", sys.executable, "-c", FETCH.replace("timeout=1", "timeout=20"))


def test_a_server_is_reached_from_outside(hosts):
    listen = "import socket; s = socket.create_server(('127.0.0.1', 4712)); print('up', flush=True); s.accept()[0].sendall(b'hello')"
    server = subprocess.Popen([*hosts.prefix("b"), sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True)
    with server:
        assert server.stdout.readline() == "up\n"
        with hosts.connect("b", 4712) as connection:
            assert connection.recv(5) == b"hello"
    with pytest.raises(RuntimeError, match="refused"):
        hosts.connect("a", 4712)


def test_the_hosts_know_their_names_and_reap_orphans(hosts):
    for host, address in ADDRESS.items():
        assert address in hosts.run(host, "getent", "hosts", f"mh-{host}")
    hosts.run("a", "sh", "-c", "sleep 0.01 & sleep 0.01 & exit")
    eventually(lambda: " Z" not in hosts.run("a", "ps", "-e", "-o", "pid,stat"))


def test_everything_is_gone_when_it_is_killed():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with TwoHosts() as hosts:
        inside = subprocess.Popen([*hosts.prefix("a"), "sleep", "600"])
    assert inside.wait(10) != 0

"""The pytest plugin: options, the backend under test, its peers, and the result."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_connector_contract_tests.harness.backend import Backend, read_config, running
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.eventually import limit_patience
from omni_connector_contract_tests.harness.payloads import Bulk, has_torch
from omni_connector_contract_tests.harness.peers import Peers
from omni_connector_contract_tests.harness.probes import LeakProbe
from omni_connector_core import OmniConnectorError, plugin_manager

pytest.register_assert_rewrite("omni_connector_contract_tests.suite", "omni_connector_contract_tests.harness")

PATIENCE_S = 30.0
CALLS_AT_ONCE = 16
PEERS = pytest.StashKey[Peers]()
"""Peers that outlive one run; who makes them warms them up and ends them."""
BUILT_IN = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    group = parser.getgroup("omni-connector contract tests")
    group.addoption("--connector", metavar="NAME", help="the backend to test")
    group.addoption("--connector-config", metavar="FILE", type=Path, help="its options, YAML or JSON")
    group.addoption(
        "--connector-service",
        choices=("auto", "on", "off"),
        default="auto",
        help="start the daemons that the backend's plugin names (auto: unless a config is given)",
    )
    group.addoption(
        "--service-setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of those daemons, as mode=shared; may be repeated",
    )
    group.addoption("--level", type=int, default=4, metavar="N", help="run the contract up to level N (1 to 4)")
    group.addoption("--contract-json", metavar="FILE", type=Path, help="write the results as JSON")
    group.addoption(
        "--contract-patience",
        type=float,
        default=PATIENCE_S,
        metavar="S",
        help=f"seconds after which a peer that does not answer counts as hung ({PATIENCE_S:g})",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and what judges and reports the run."""
    config.addinivalue_line(
        "markers", "omni_capability(name, claimed): run only where the backend claims (or does not) a capability"
    )
    config.addinivalue_line("markers", "omni_option(*names): the test shows an effect of these options")
    from omni_connector_contract_tests.integrity import Integrity
    from omni_connector_contract_tests.report import Report

    config.pluginmanager.register(Integrity(config), "omni-connector-integrity")
    config.pluginmanager.register(Report(config), "omni-connector-report")
    limit_patience(config.getoption("contract_patience"))
    name = config.getoption("connector")
    if name is not None:
        _check_installed(name)


def _check_installed(name: str) -> None:
    try:
        spec = plugin_manager.spec(name)
    except OmniConnectorError as error:
        raise pytest.UsageError(str(error)) from error
    if not spec.sdk_present():
        raise pytest.UsageError(
            f"the backend {name!r} needs the SDK {spec.sdk!r}, which is not installed. Install it: {spec.install}"
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of the suite's own folder collect the contract, or with --benchmark-only the benchmarks, if a backend is named."""
    if BUILT_IN not in collection_path.parents:
        return None
    benchmarks = config.getoption("benchmark_only", False)
    wanted = BUILT_IN / ("test_benchmarks.py" if benchmarks else "test_contract.py")
    return None if collection_path == wanted and config.getoption("connector") is not None else True


@pytest.fixture(scope="session")
def connector_backend(pytestconfig: pytest.Config) -> Iterator[Backend]:
    """Describe the backend under test. A backend's own tests define this fixture themselves."""
    name: str | None = pytestconfig.getoption("connector")
    if name is None:
        pytest.fail("name the backend: --connector NAME, or define the fixture connector_backend", pytrace=False)
    path: Path | None = pytestconfig.getoption("connector_config")
    service = {"auto": None, "on": True, "off": False}[pytestconfig.getoption("connector_service")]
    settings: list[str] = pytestconfig.getoption("service_setting")
    config = None if path is None else read_config(path)
    with running(name, config, service=service, settings=settings) as backend:
        yield backend


@pytest.fixture(scope="session")
def contract_peers(pytestconfig: pytest.Config, connector_backend: Backend) -> Iterator[Peers]:
    """Keep the processes in which ends live; each made a transfer before the first test counts what it holds."""
    if PEERS in pytestconfig.stash:
        yield pytestconfig.stash[PEERS]
        return
    peers = Peers(
        processes=connector_backend.capabilities.cross_process,
        patience_s=pytestconfig.getoption("contract_patience"),
        folders=connector_backend.folders,
    )
    try:
        warm_up(connector_backend, peers, Ends(connector_backend, peers))
        yield peers
    finally:
        peers.shutdown()


@pytest.fixture(scope="class")
def contract_leaks_nothing(contract_peers: Peers) -> Iterator[None]:
    """Compare what the peers hold before and after a class of tests."""
    probe = LeakProbe(contract_peers)
    yield
    probe.check()


def warm_up(backend: Backend, peers: Peers, ends: Ends) -> None:
    """Let the lasting peers pay what a process pays once, in every role, with every other."""
    names = ("producer", "consumer", "second producer", "second consumer")
    try:
        for there, here in itertools.permutations(names if peers.processes else names[:2], 2):
            _warm_up_pair(ends, there, here, told=False)
        for apart in peers.apart if backend.capabilities.cross_host else ():  # who shares no folder with the others
            _warm_up_pair(ends, names[0], apart, told=True)
    finally:
        ends.close()


def _warm_up_pair(ends: Ends, there: str, here: str, *, told: bool) -> None:
    """Make many transfers at once: an engine's pool of connections grows with the calls in flight, and keeps them.

    Parameters
    ----------
    told
        Whether the consumer gets the metadata.
    """
    producer = ends.open("producer", on=there, edge=(there, here))
    consumer = ends.open("consumer", on=here, edge=(there, here))

    def put(key: str, payload: Any) -> tuple[str, Any]:
        metadata = producer.put(key, payload)
        return key, metadata if told else None

    # large enough to be moved as large payloads are
    keys = [put(f"warm{n}", bytes(200_000)) for n in range(CALLS_AT_ONCE)]
    for pending in [consumer.start("get", *key) for key in keys]:
        pending.result()
    if has_torch():  # whose first use starts threads that stay
        consumer.get_fingerprint(*put("warm", Bulk(200_000, kind="tensor")))
    for end in (producer, consumer):
        for pending in [end.start("health") for _ in range(CALLS_AT_ONCE)]:
            pending.result()

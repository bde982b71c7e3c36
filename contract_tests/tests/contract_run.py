"""Runs a few tests of the contract on a backend, in this process, and returns what came of them."""

from pathlib import Path

import pytest

import omni_connector_contract_tests
from omni_connector_contract_tests.plugin import PEERS
from omni_connector_core import BackendSpec, plugin_manager

SUITE = Path(omni_connector_contract_tests.__file__).parent / "test_contract.py"
# the outer run has these already; they change the interpreter
WITHOUT = (
    "terminal",
    "cacheprovider",
    "faulthandler",
    "threadexception",
    "unraisableexception",
    "capture",
    "timeout",
    "cov",
)


class Outcome:
    """Collects the reports of a run."""

    def __init__(self, peers):
        self.peers = peers
        self.failed = {}
        self.passed = set()
        self.broken = []

    def pytest_configure(self, config):
        if self.peers is not None:
            config.stash[PEERS] = self.peers

    def pytest_runtest_logreport(self, report):
        test = report.nodeid.split("::", 1)[-1]
        if report.failed and report.when == "setup":
            self.broken.append(f"{test}: {report.longreprtext}")
        elif report.failed:
            self.failed[test] = report.longreprtext
        elif report.passed and report.when == "call":
            self.passed.add(test)

    def pytest_collectreport(self, report):
        if report.failed:
            self.broken.append(report.longreprtext)


def run_contract(spec: BackendSpec, *tests: str, patience_s: float, config: Path | None = None, peers=None) -> Outcome:
    """Run tests (``Class::test``; none: all) of the contract on a backend, with peers of its own or lent ones."""
    plugin_manager.register(spec)
    outcome = Outcome(peers)
    arguments = [*(f"{SUITE}::{test}" for test in tests)] or [str(SUITE)]
    arguments += [f"--rootdir={SUITE.parent}", "-c", "/dev/null", "--connector", spec.name]
    arguments += [f"--contract-patience={patience_s}", *(f"-pno:{name}" for name in WITHOUT)]
    if config is not None:
        arguments += ["--connector-config", str(config)]
    try:
        pytest.main(arguments, plugins=[outcome])
    finally:
        plugin_manager.unregister(spec)
    return outcome

"""What a run found: a table by level on the terminal, and JSON for the matrix."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.integrity import Integrity, is_contract
from omni_connector_contract_tests.suite.base import SKIPPED_FOR

__all__ = ["LEVELS", "Report"]

LEVELS = {1: "put and get", 2: "configuration", 3: "stage flow", 4: "KV-cache flow"}


class Report:
    """Collects the outcome of each test of the contract."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._backend: Backend | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Learn which backend it is from the first test."""
        if is_contract(item) and self._backend is None:
            self._backend = getattr(item, "funcargs", {}).get("connector_backend")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record the worst of setup, call and teardown."""
        report = yield
        if is_contract(item):
            seen = self._outcomes.setdefault(
                item.nodeid,
                {
                    "test": item.nodeid.rsplit("/", 1)[-1].split("::", 1)[-1],
                    "level": item.cls.level,  # type: ignore[attr-defined]
                    "outcome": "passed",
                    "seconds": 0.0,
                },
            )
            seen["seconds"] = round(seen["seconds"] + call.duration, 4)
            if report.outcome == "failed":
                seen["outcome"] = "failed"
            elif report.outcome == "skipped" and seen["outcome"] == "passed":
                seen["outcome"] = "skipped"
                seen["capability"] = item.stash.get(SKIPPED_FOR, None)
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write the table, and the JSON where it was asked for."""
        if not self._outcomes:
            return
        path: Path | None = self._config.getoption("contract_json")
        outcomes = {outcome["test"]: outcome for outcome in self._outcomes.values()}
        if path is not None and path.exists() and self._config.getoption("lf", default=False):  # what failed, once more
            again = {test: {**outcome, "again": True} for test, outcome in outcomes.items()}
            outcomes = {outcome["test"]: outcome for outcome in json.loads(path.read_text())["tests"]} | again
        results = self._results(list(outcomes.values()))
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(results, indent=1) + "\n")
        _print_table(results)

    def _results(self, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
        backend = self._backend
        integrity: Integrity = self._config.pluginmanager.get_plugin("omni-connector-integrity")  # type: ignore[assignment]
        return {
            "backend": None if backend is None else backend.name,
            "summary": None if backend is None else backend.describe().summary,
            "capabilities": None if backend is None else asdict(backend.capabilities),
            "core": version("omni-connector-core"),
            "suite": version("omni-connector-contract-tests"),
            "deviations": integrity.reasons,
            "levels": {
                str(level): dict(Counter(t["outcome"] for t in outcomes if t["level"] == level))
                for level in LEVELS
                if any(t["level"] == level for t in outcomes)
            },
            "tests": outcomes,
        }


def _print_table(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"omni-connector contract: {results['backend']}")
    for column in ("level", "passed", "failed", "skipped by capability"):
        table.add_column(column, justify="left" if column == "level" else "right")
    for level, counts in results["levels"].items():
        name = f"{level} {LEVELS[int(level)]}"
        table.add_row(name, *(str(counts.get(outcome, 0)) for outcome in ("passed", "failed", "skipped")))
    console = Console(highlight=False)
    console.print()
    console.print(table)
    skipped = Counter(t["capability"] for t in results["tests"] if t["outcome"] == "skipped" and t.get("capability"))
    for capability, count in sorted(skipped.items()):
        console.print(f"  skipped for {capability}: {count}")
    for test, reason in results["deviations"].items():
        console.print(f"  deviation: {test}: {reason}")

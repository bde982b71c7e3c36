"""Sees to it that a backend's own tests hold the whole contract, or say why not."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from omni_connector_contract_tests.suite.base import SKIPPED_FOR, ContractTests

__all__ = ["Integrity", "contract_classes", "deviations"]


def contract_classes() -> dict[str, type[ContractTests]]:
    """Return every class of the contract by name."""
    from omni_connector_contract_tests import suite

    found = {name: getattr(suite, name) for name in suite.__all__}
    return {name: cls for name, cls in found.items() if isinstance(cls, type) and issubclass(cls, ContractTests)}


def contract_tests(cls: type[ContractTests]) -> Iterator[str]:
    """Name the tests of a class of the contract."""
    return (name for name, _ in inspect.getmembers(cls, inspect.isfunction) if name.startswith("test_"))


def deviations(module: Any) -> tuple[dict[str, str], list[str]]:
    """Compare a module that holds the contract with the contract.

    Returns
    -------
    dict, list
        The reasons of the tests that were replaced, by name; and what is missing or was replaced without one.
    """
    present = [cls for cls in vars(module).values() if isinstance(cls, type) and issubclass(cls, ContractTests)]
    reasons, faults = {}, []
    for name, original in contract_classes().items():
        heirs = [cls for cls in present if issubclass(cls, original)]
        if not heirs:
            faults.append(f"{name} is missing")
            continue
        for cls in heirs:
            for test in contract_tests(original):
                own = getattr(cls, test, None)
                if own is getattr(original, test):
                    continue
                reason = getattr(own, "__omni_deviation__", None)
                if reason is None:
                    faults.append(f"{name}.{test} was {'removed' if own is None else 'replaced'}")
                else:
                    reasons[f"{name}.{test}"] = reason
    return reasons, faults


class Integrity:
    """Fails a run in which a part of the contract was removed, replaced or skipped without a reason."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._collected: set[str] = set()
        self._deselected: set[str] = set()
        self.reasons: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Compare each module that holds the contract; leave out levels that were not asked for."""
        contract = [item for item in items if is_contract(item)]
        faults: list[str] = []
        for module in {item.getparent(pytest.Module) for item in contract}:
            assert module is not None
            reasons, found = deviations(module.obj)
            self.reasons |= reasons
            faults += [f"{module.name}: {fault}" for fault in found]
        if faults:
            raise pytest.UsageError(
                "the contract is not complete: " + "; ".join(faults) + '. Say why with @deviation("reason")'
            )
        level = 0 if self._config.getoption("benchmark_only", False) else self._config.getoption("level")
        left_out = [item for item in contract if item.cls.level > level]  # type: ignore[attr-defined]
        if left_out:
            items[:] = [item for item in items if item not in set(left_out)]
            self._config.hook.pytest_deselected(items=left_out)
        self._collected = {item.nodeid for item in contract}

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Take note of what the user left out (-k, -m, --level)."""
        self._deselected |= {item.nodeid for item in items}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """See whether a hook of somebody's took tests away without saying so."""
        lost = self._collected - self._deselected - {item.nodeid for item in session.items}
        if lost:
            raise pytest.UsageError(f"{len(lost)} tests of the contract were taken away, such as {min(lost)}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Turn a skip or an expected failure that no capability explains into a failure."""
        report = yield
        excused = SKIPPED_FOR in item.stash or _reason(item) is not None
        if is_contract(item) and report.outcome == "skipped" and not excused:
            report.outcome = "failed"
            report.longrepr = f"skipped for no capability: {report.longrepr}"
            if hasattr(report, "wasxfail"):
                del report.wasxfail
        return report


def is_contract(item: pytest.Item) -> bool:
    """Whether a test belongs to a class of the contract."""
    cls = getattr(item, "cls", None)
    return isinstance(cls, type) and issubclass(cls, ContractTests)


def _reason(item: pytest.Item) -> str | None:
    return getattr(getattr(item, "function", None), "__omni_deviation__", None)

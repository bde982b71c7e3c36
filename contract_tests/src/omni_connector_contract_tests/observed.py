"""Sees to it that every option of a backend has a test that shows an effect of setting it.

A backend's own tests say with `observes` which options they show an effect of; the contract itself does so for those that every
backend has, and for `capacity_bytes`. One test holds the two against the fields of the options type::

    from omni_connector_contract_tests.observed import observes, unobserved

    @observes("folder")
    def test_the_files_lie_in_the_folder(tmp_path): ...

    def test_every_option_has_a_test():
        assert unobserved(MyBackendOptions, sys.modules[__name__]) == []
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from types import ModuleType

from omni_connector_contract_tests.integrity import contract_classes
from omni_connector_contract_tests.suite.base import observes
from omni_connector_core.options import Options

__all__ = ["observes", "unobserved"]


def unobserved(options: type[Options], *modules: ModuleType) -> list[str]:
    """Compare a backend's options with the tests that observe them.

    Parameters
    ----------
    options
        The backend's options type.
    modules
        The modules of the backend's own tests.

    Returns
    -------
    list of str
        A sentence for each option that no test observes, and for each that a test observes and the backend does not have.
    """
    fields = {field.name for field in dataclasses.fields(options)}
    own = set(_observed(value for module in modules for value in vars(module).values()))
    by_contract = set(_observed(contract_classes().values()))
    return [f"no test observes the option {name}" for name in sorted(fields - own - by_contract)] + [
        f"a test observes {name}, which is no option" for name in sorted(own - fields)
    ]


def _observed(tests: Iterable[object]) -> Iterator[str]:
    for test in tests:
        if inspect.isclass(test):
            yield from _observed(value for _, value in inspect.getmembers(test, inspect.isfunction))
        elif inspect.isfunction(test) and test.__name__.startswith("test_"):
            for mark in getattr(test, "pytestmark", ()):
                if mark.name == "omni_option":
                    yield from mark.args

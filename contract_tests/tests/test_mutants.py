"""The suite can fail: every broken transport is caught, by the test that is meant to catch it."""

import dataclasses
import importlib
import os
from pathlib import Path

import pytest
from contract_run import run_contract

from omni_connector_contract_tests.harness.payloads import has_torch
from omni_connector_contract_tests.mutants import MUTANTS
from omni_connector_core import plugin_manager

IN_ONE_PROCESS = sorted(name for name, mutant in MUTANTS.items() if not mutant.transport.capabilities.cross_process)
PATIENCE_S = 2.0  # a mutant that hangs costs this much


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "quick.yaml"
    path.write_text("timeout_s: 1.5\n")
    if has_torch():
        importlib.import_module("torch")  # here, as it takes longer than a mutant has
    yield path
    for left in Path("/dev/shm").glob(f"contract-{os.getpid()}-*"):  # by the mutant that leaks files
        left.unlink()


def test_there_are_enough_mutants_and_each_says_what_it_breaks():
    assert len(MUTANTS) >= 40
    for mutant in MUTANTS.values():
        assert mutant.spec().summary.endswith(".")


@pytest.mark.parametrize("tests", sorted({MUTANTS[name].test for name in IN_ONE_PROCESS}))
def test_what_catches_mutants_passes_the_reference(tests, quick):
    spec = dataclasses.replace(plugin_manager.spec("memory"), name="memory_again")
    outcome = run_contract(spec, tests, patience_s=PATIENCE_S, config=quick)
    assert not outcome.broken, outcome.broken[0]
    assert not outcome.failed, next(iter(outcome.failed.values()))
    assert outcome.passed


@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_a_mutant_is_caught_by_the_test_that_is_meant_to(name, quick):
    mutant = MUTANTS[name]
    outcome = run_contract(mutant.spec(), mutant.test, patience_s=PATIENCE_S, config=quick)
    assert not outcome.broken, outcome.broken[0]
    assert outcome.failed, f"{mutant.test} passes although: {mutant.spec().summary}"

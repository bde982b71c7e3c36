"""Levels 3 and 4 can fail: every flow done wrong is caught, by the test that is meant to catch it."""

import dataclasses

import pytest
from contract_run import run_contract

from omni_connector_contract_tests.mutants.of_flows import FLOW_MUTANTS
from omni_connector_core import plugin_manager

PATIENCE_S = 5.0


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "quick.yaml"
    path.write_text("timeout_s: 1.0\n")
    return path


@pytest.fixture
def reference():
    return dataclasses.replace(plugin_manager.spec("memory"), name="memory_under_flows")


def test_there_are_enough_mutants_and_each_says_what_it_breaks():
    assert len(FLOW_MUTANTS) >= 15
    assert all(mutant.wrong.__doc__.endswith(".") for mutant in FLOW_MUTANTS.values())


@pytest.mark.parametrize("name", FLOW_MUTANTS)
def test_a_mutant_is_caught_by_the_test_that_is_meant_to(name, reference, quick):
    mutant = FLOW_MUTANTS[name]
    with mutant.applied():
        outcome = run_contract(reference, mutant.test, patience_s=PATIENCE_S, config=quick)
    assert not outcome.broken, outcome.broken[0]
    assert outcome.failed, f"{mutant.test} passes although: {mutant.wrong.__doc__}"


@pytest.mark.parametrize("test", sorted({mutant.test for mutant in FLOW_MUTANTS.values()}))
def test_what_catches_mutants_passes_as_it_is(test, reference, quick):
    outcome = run_contract(reference, test, patience_s=PATIENCE_S, config=quick)
    assert not outcome.broken, outcome.broken[0]
    assert not outcome.failed, next(iter(outcome.failed.values()))
    assert outcome.passed

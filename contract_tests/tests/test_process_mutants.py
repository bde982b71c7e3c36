"""The suite can fail, between processes too: broken relatives of the template, which itself is right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from contract_run import run_contract

import omni_connector_contract_tests
from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.peers import Peers
from omni_connector_contract_tests.plugin import warm_up

sys.path.insert(0, str(Path(omni_connector_contract_tests.__file__).parent / "template" / "src"))

from omni_connector_my_backend.plugin import omni_connector_backend

from omni_connector_contract_tests.mutants import MUTANTS, of_processes

OF_PROCESSES = sorted(n for n, m in MUTANTS.items() if m.transport.__module__ == of_processes.__name__)
PATIENCE_S = 8.0


@pytest.fixture(scope="module")
def peers():
    """Four processes, started once for all mutants."""
    peers = Peers(processes=True, patience_s=PATIENCE_S)
    template = Backend("my_backend", spec=omni_connector_backend())
    try:
        warm_up(template, peers, Ends(template, peers))
        yield peers
    finally:
        peers.shutdown()


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "quick.yaml"
    path.write_text("timeout_s: 3\n")
    return path


@pytest.mark.parametrize("test", sorted({MUTANTS[name].test for name in OF_PROCESSES}))
def test_what_catches_mutants_passes_the_template(test, peers, quick):
    outcome = run_contract(omni_connector_backend(), test, patience_s=PATIENCE_S, config=quick, peers=peers)
    assert not outcome.broken, outcome.broken[0]
    assert not outcome.failed, next(iter(outcome.failed.values()))
    assert outcome.passed


@pytest.mark.parametrize("name", OF_PROCESSES)
def test_a_mutant_is_caught_by_the_test_that_is_meant_to(name, peers, quick):
    mutant = MUTANTS[name]
    outcome = run_contract(mutant.spec(), mutant.test, patience_s=PATIENCE_S, config=quick, peers=peers)
    assert not outcome.broken, outcome.broken[0]
    assert outcome.failed, f"{mutant.test} passes although: {mutant.spec().summary}"


def test_what_is_left_in_a_folder_that_the_options_name_is_seen(tmp_path):
    """It may lie outside the peers' temporary folder, where nobody but the options says that it is the backend's."""
    config = tmp_path / "config.yaml"
    config.write_text(f"timeout_s: 3\nfolder: {tmp_path / 'files'}\n")
    mutant = MUTANTS["SweepsNothing"]
    outcome = run_contract(mutant.spec(), mutant.test, patience_s=PATIENCE_S, config=config)
    assert not outcome.broken, outcome.broken[0]
    assert outcome.failed

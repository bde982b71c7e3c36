"""The pytest plugin: what it runs, what it refuses, and what it reports. Each run is a pytest of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from omni_connector_contract_tests import matrix

OWN_TESTS = """
import pytest
from omni_connector_contract_tests.suite import *

@pytest.fixture(scope="session")
def connector_backend():
    return Backend("memory", {"timeout_s": 3})
"""


@pytest.fixture
def run(tmp_path):
    def run(*arguments, tests=None):
        if tests is not None:
            (tmp_path / "test_own.py").write_text(tests)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--rootdir", tmp_path, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    return run


def suite(*arguments):
    return ("--pyargs", "omni_connector_contract_tests", *arguments)


def test_from_any_folder_by_name_with_a_table_and_json(run, tmp_path):
    done = run(*suite("--connector", "memory", "--contract-json", "out/memory.json", "-k", "TestReads or TestDeath"))
    assert done.returncode == 0, done.stdout
    assert "omni-connector contract: memory" in done.stdout
    assert "skipped for cross_process: " in done.stdout
    found = json.loads((tmp_path / "out/memory.json").read_text())
    assert found["backend"] == "memory"
    assert found["capabilities"]["fan_out"] is True
    assert found["levels"]["1"]["passed"] >= 8
    skipped = [test for test in found["tests"] if test["outcome"] == "skipped"]
    assert {test["capability"] for test in skipped} >= {"cross_process", "fan_out"}
    table = matrix.render([tmp_path / "out/memory.json"])
    assert f"| `memory` | all {found['levels']['1']['passed']} |" in table


def test_options_from_a_file_reach_the_backend(run, tmp_path):
    (tmp_path / "options.yaml").write_text("timeout_s: 3\nno_such_option: 1\n")
    done = run(
        *suite("--connector", "memory", "--connector-config", "options.yaml", "-k", "test_a_payload_is_read_once")
    )
    assert done.returncode == 1
    assert "no_such_option" in done.stdout


def test_a_level_leaves_out_what_is_above_it(run):
    done = run(*suite("--connector", "memory", "--level", "1", "--collect-only"))
    assert "TestTransfer" in done.stdout
    assert "TestDeployFile" not in done.stdout
    done = run(*suite("--connector", "memory", "--level", "2", "--collect-only"))
    assert "TestDeployFile" in done.stdout


def test_without_a_name_nothing_is_collected_by_accident(run):
    done = run(*suite("--collect-only"))
    assert "TestTransfer" not in done.stdout


def test_a_backend_that_is_not_installed_fails_the_run_and_says_what_is(run):
    done = run(*suite("--connector", "memorie"))
    assert done.returncode == 4
    assert "did you mean 'memory'" in done.stderr


def test_a_missing_sdk_fails_the_run_and_says_how_to_install_it(run, tmp_path):
    (tmp_path / "plugin_without_sdk.py").write_text(
        "from omni_connector_core import BackendSpec, Capabilities, hookimpl\n"
        "@hookimpl\n"
        "def omni_connector_backend():\n"
        "    return BackendSpec(name='sdkless', summary='x', transport='no_such_sdk:T', options='no_such_sdk:O',\n"
        "                       capabilities=Capabilities(), install='pip install the-sdk', sdk='no_such_sdk')\n"
    )
    info = tmp_path / "sdkless-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sdkless\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[omni_connector]\nsdkless = plugin_without_sdk\n")
    done = run(*suite("--connector", "sdkless"))
    assert done.returncode == 4
    assert "pip install the-sdk" in done.stderr


def test_what_is_run_once_more_completes_the_results_of_the_run_before(run, tmp_path):
    first = run(*suite("--connector", "memory", "--contract-json", "out.json", "-k", "TestReads"))
    assert first.returncode == 0, first.stdout
    before = json.loads((tmp_path / "out.json").read_text())
    again = ["-p", "cacheprovider", "--last-failed", "-k", "test_a_payload_is_read_once"]
    second = run(*suite("--connector", "memory", "--contract-json", "out.json", *again))
    assert second.returncode == 0, second.stdout
    after = json.loads((tmp_path / "out.json").read_text())
    assert after["levels"] == before["levels"]
    assert [t["test"] for t in after["tests"] if t.get("again")] == ["TestReads::test_a_payload_is_read_once"]


def test_two_lines_and_a_fixture_hold_a_backends_own_tests_to_the_contract(run):
    done = run("test_own.py", "-k", "TestTransfer and empty or TestReads", tests=OWN_TESTS)
    assert done.returncode == 0, done.stdout
    assert "omni-connector contract: memory" in done.stdout


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("from omni_connector_contract_tests.suite import TestReads, Backend", "TestTransfer is missing"),
        (
            "class TestReads(TestReads):\n    test_a_payload_is_read_once = None",
            "TestReads.test_a_payload_is_read_once",
        ),
        ("class TestReads(TestReads):\n    def test_a_payload_is_read_once(self): pass", "was replaced"),
        ("TestReads = None", "TestReads is missing"),
    ],
    ids=["import a part", "delete a test", "override a test", "delete a class"],
)
def test_leaving_out_a_test_without_a_reason_fails_the_run(run, change, complaint):
    tests = (
        OWN_TESTS.replace("from omni_connector_contract_tests.suite import *", change)
        if "import" in change
        else OWN_TESTS + change
    )
    done = run("test_own.py", tests=tests)
    assert done.returncode == 4, done.stdout
    assert complaint in done.stderr
    assert "@deviation" in done.stderr


def test_a_deviation_with_a_reason_runs_and_is_reported(run, tmp_path):
    change = (
        "class TestReads(TestReads):\n"
        "    @deviation('this store hands out two')\n"
        "    def test_a_payload_is_read_once(self, ends): pass\n"
    )
    done = run("test_own.py", "-k", "TestReads", "--contract-json", "out.json", tests=OWN_TESTS + change)
    assert done.returncode == 0, done.stdout
    assert "deviation: TestReads.test_a_payload_is_read_once: this store hands out two" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["deviations"] == {"TestReads.test_a_payload_is_read_once": "this store hands out two"}


def test_a_skip_that_no_capability_explains_is_a_failure(run, tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items:\n"
        "        if item.name == 'test_a_payload_is_read_once':\n"
        "            item.add_marker(pytest.mark.skip(reason='flaky'))\n"
    )
    done = run("test_own.py", "-k", "test_a_payload_is_read_once", tests=OWN_TESTS)
    assert done.returncode == 1, done.stdout
    assert "skipped for no capability" in done.stdout


def test_taking_tests_away_in_a_hook_fails_the_run(run, tmp_path):
    (tmp_path / "conftest.py").write_text(
        "def pytest_collection_modifyitems(items):\n"
        "    items[:] = [item for item in items if item.name != 'test_a_payload_is_read_once']\n"
    )
    done = run("test_own.py", tests=OWN_TESTS)
    assert done.returncode != 0
    assert "were taken away" in done.stderr + done.stdout

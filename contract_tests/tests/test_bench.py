"""The bench command: a backend's own script is run, judged and written down."""

import json
import subprocess
import sys

SCRIPT = """
from omni_connector_contract_tests.bench import Ratio

def measure(bench):
    assert bench.backend.name == "memory" and bench.upstream is None
    yield Ratio("kept", 1.0, 1.0, 1 / 0.9)
    yield Ratio("shown", 3.0, 1.0)
    yield Ratio("lost", 2.0, 1.0, 1.0)
"""


def test_a_script_beside_the_vendors_calls_is_run_judged_and_written_down(tmp_path):
    script = tmp_path / "bench_of_mine.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "omni_connector_contract_tests.bench", "--connector", "memory", "--part", "raw"]
    command += ["--against", script, "--without-upstream", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "memory.json").read_text())
    assert [(ratio["name"], ratio["held"]) for ratio in found["ratios"]] == [
        ("kept", True),
        ("shown", None),
        ("lost", False),
    ]
    assert done.stdout.count("missed") == 2  # as it comes, and in the table
    strict = subprocess.run([*command, "--strict"], capture_output=True, text=True, timeout=120, check=False)
    assert strict.returncode == 1

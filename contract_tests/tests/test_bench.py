"""The bench command: a backend's own script is run, judged and written down."""

import json
import subprocess
import sys

from omni_connector_contract_tests.bench import compare

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


def test_the_plot_of_all_backends_says_when_and_where_they_were_measured(tmp_path):
    row = {"nbytes": 1024, "transfer_s": 1e-4, "put_s": 5e-5, "memcpy_s": 1e-6}
    for name, date, load in (("one", "2026-01-01 10:00 UTC", 0.25), ("two", "2026-01-01 10:05 UTC", 1.0)):
        machine = {"cpu": "a processor", "cpus": 2, "load": load, "python": "3.11"}
        result = {"connector": name, "date": date, "machine": machine, "transfers": [row]}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    (tmp_path / "without.json").write_text(json.dumps({"connector": "without", "transfers": []}))
    backends, where = compare.read(tmp_path)
    assert list(backends) == ["one", "two"]
    assert where == "2026-01-01 10:00 UTC, a processor, 2 cores, load 0.2 to 1.0"
    compare.draw(tmp_path / "plot.png", backends, where)
    assert (tmp_path / "plot.png").stat().st_size

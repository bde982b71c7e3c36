"""`omni-connector new`: what it writes is a backend that keeps the contract, as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from omni_connector_contract_tests.scaffold import template_files, write_package

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "write_your_own_backend.md"


def test_nothing_of_the_template_s_name_is_left(tmp_path):
    written = write_package("shiny_store", tmp_path / "new")
    assert len(written) == len(template_files())
    for path in written:
        text = f"{path.relative_to(tmp_path)}\n{path.read_text()}"
        assert not re.search(r"my.?backend", text, re.IGNORECASE)
    assert "class ShinyStoreTransport" in (tmp_path / "new/src/omni_connector_shiny_store/transport.py").read_text()
    assert 'name = "omni-connector-shiny-store"' in (tmp_path / "new/pyproject.toml").read_text()


@pytest.mark.parametrize("name", ["", "Shiny", "shiny-store", "1shiny", "class", "_shiny", "shiny__store", "../shiny"])
def test_a_name_that_python_cannot_import_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="a backend's name"):
        write_package(name, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        write_package("shiny", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_plugin_module_is_short():
    assert len(template_files()["src/omni_connector_my_backend/plugin.py"].splitlines()) <= 40


def test_the_guide_shows_the_template():
    """Every code block of the guide that names a file of the template is that file."""
    blocks = re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', GUIDE.read_text(), re.DOTALL)
    files = template_files()
    shown = {title: text for title, text in blocks if title in files}
    assert {title.rsplit("/", 1)[-1] for title in shown} >= {
        "plugin.py",
        "options.py",
        "transport.py",
        "files.py",
        "test_my_backend_contract.py",
    }
    for title, text in shown.items():
        assert text == files[title], f"{title} in the guide is not the template's; run docs/generate.py"


@pytest.mark.slow
def test_a_new_package_passes_the_suite_in_a_bare_environment(tmp_path):
    """Build and install core, suite and the new package as users do, and run the new package's own tests."""
    project = tmp_path / "project"
    write_package("shiny_store", project)
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    subprocess.run([*install, "./omni_connector_core", "./contract_tests", str(project)], cwd=ROOT, check=True)
    results = tmp_path / "results.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(
        [python, "-m", "pytest", "tests", "--level", "1", "--contract-json", results],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    found = json.loads(results.read_text())
    assert found["backend"] == "shiny_store"
    assert found["levels"]["1"]["passed"] > 200
    assert "failed" not in found["levels"]["1"]
    assert found["deviations"] == {}

"""Each package, installed alone with its documented command in a bare environment."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    str(project.parent.relative_to(ROOT)): next(project.parent.glob("src/*")).name
    for project in [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]
}


def bare_environment(folder: Path) -> Path:
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def install(python: Path, *packages: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *packages]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr


def run(python: Path, code: str, cwd: Path) -> str:
    done = subprocess.run([python, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_installs_alone_and_imports(package: str, tmp_path: Path) -> None:
    python = bare_environment(tmp_path / "venv")
    install(python, *dict.fromkeys(["./omni_connector_core", f"./{package}"]))
    code = f"import sys, {PACKAGES[package]}; assert 'torch' not in sys.modules; "
    code += "import importlib.util; print(importlib.util.find_spec('torch'))"
    assert run(python, code, tmp_path).strip() == "None"
    listed = "from omni_connector_core import plugin_manager; print(plugin_manager.names())"
    names = run(python, listed, tmp_path)
    assert "memory" in names
    if package.startswith("plugins/"):
        name = package.removeprefix("plugins/")
        assert name in names
        spec = f"from omni_connector_core import plugin_manager; print(plugin_manager.spec({name!r}).capabilities)"
        assert "Capabilities" in run(python, spec, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("compiler", "compiled"), [({}, True), ({"CC": "/bin/false"}, False)], ids=["with", "without"])
def test_the_core_is_compiled_where_there_is_a_compiler(
    compiler: dict[str, str], compiled: bool, tmp_path: Path
) -> None:
    python = bare_environment(tmp_path / "venv")
    install(python, "--no-cache-dir", "./omni_connector_core", **compiler)
    code = """
import numpy as np
from omni_connector_core.codec import Codec
from omni_connector_core.native import native
frame = Codec().encode({"hidden": np.arange(5)})
memory = bytearray(frame.nbytes)
frame.write_into(memory)
print(native is not None, Codec().decode(memory))
"""
    assert run(python, code, tmp_path).strip() == f"{compiled} {{'hidden': array([0, 1, 2, 3, 4])}}"

"""The documentation: its code runs, its tables are those of the code, and it builds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_connector_core.config import check_backends, parse
from omni_connector_serve.vllm_omni.backends import drop_in_names
from omni_connector_serve.vllm_omni.extra import upstream_options

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("plugins/*/README.md")]
)
YAML = re.compile(r"^```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks() -> list[object]:
    """Every python block of every page that is a program; one that begins with a comment ``# part of`` is not."""
    found = []
    for page in PAGES:
        for number, code in enumerate(BLOCK.findall(page.read_text())):
            if not code.startswith("# part of"):
                found.append(pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}"))
    return found


@pytest.mark.parametrize("code", blocks())
def test_the_code_in_the_documentation_runs(code: str, tmp_path: Path) -> None:
    program = tmp_path / "block.py"
    program.write_text(code)
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def deploy_files() -> list[object]:
    """Every yaml block that names a connector; one without stages is completed with two, for each of its connectors."""
    found = []
    for page in PAGES:
        for number, text in enumerate(YAML.findall(page.read_text())):
            document = yaml.safe_load(text)
            if isinstance(document, dict) and {"connector", "connectors"} & document.keys():
                for name, complete in completed(document).items():
                    found.append(pytest.param(complete, id=f"{page.relative_to(ROOT)}-{number}{name}"))
    return found


def completed(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    if "stages" in document:
        return {"": document}
    edges = {"edges": [{"from": 0, "to": 1}]}
    sides = {f"-{name}": {"output_connectors": {"to_stage_1": name}} for name in document.get("connectors", ())}
    return {
        name: {**document, **edges, "stages": [{"stage_id": 0, **side}, {"stage_id": 1}]}
        for name, side in (sides or {"": {}}).items()
    }


@pytest.mark.parametrize("document", deploy_files())
def test_the_deploy_files_in_the_documentation_are_right(document: dict[str, Any]) -> None:
    config, upstream = parse(document), upstream_options()
    assert (
        check_backends(
            config, aliases=drop_in_names(), foreign_options=upstream.engine | upstream.pipeline | upstream.unread
        )
        == []
    )


def test_generated_tables_are_up_to_date() -> None:
    command = [sys.executable, ROOT / "docs" / "generate.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()

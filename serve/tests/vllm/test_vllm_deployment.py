# SPDX-License-Identifier: Apache-2.0
"""What a process learns of its deployment, and what it refuses before a model is loaded. No server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm_omni
from omni_server import write_deploy
from typer.testing import CliRunner

from omni_connector_core import ConfigError, Edge
from omni_connector_serve.cli import app
from omni_connector_serve.vllm_omni.backends import DROP_IN_ENV, drop_in_names
from omni_connector_serve.vllm_omni.check import faults_of
from omni_connector_serve.vllm_omni.deployment import (
    DEPLOY_ENV,
    NAMESPACE_ENV,
    adopt_command_line,
    read_deployment,
)
from omni_connector_serve.vllm_omni.startup import check_deploy_file

UPSTREAM_DEPLOYS = Path(vllm_omni.__file__).parent / "deploy"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (DEPLOY_ENV, NAMESPACE_ENV, DROP_IN_ENV):
        monkeypatch.setenv(name, "")  # restored afterwards, whatever the test does
        monkeypatch.delenv(name)


def test_head_and_headless_agree_on_a_namespace() -> None:
    adopt_command_line(["vllm", "serve", "m", "--omni-master-address", "10.0.0.1", "--omni-master-port=26001"])
    assert os.environ[NAMESPACE_ENV] == "vllm-10.0.0.1-26001"


def test_a_server_has_its_own_namespace_and_keeps_the_operators() -> None:
    adopt_command_line(["vllm", "serve", "m"])
    assert os.environ[NAMESPACE_ENV].startswith("vllm-")
    os.environ[NAMESPACE_ENV] = "mine"
    adopt_command_line(["vllm", "serve", "m"])
    assert os.environ[NAMESPACE_ENV] == "mine"


def test_deploy_file_is_found_once(tmp_path: Path) -> None:
    assert adopt_command_line(["vllm", "serve", "m", "--deploy-config", "d.yaml"]) == Path("d.yaml").absolute()
    assert os.environ[DEPLOY_ENV] == str(Path("d.yaml").absolute())
    assert adopt_command_line(["vllm", "serve", "m", "--deploy-config", "d.yaml"]) is None


def test_edges_are_read_as_the_engine_reads_them(tmp_path: Path) -> None:
    path = write_deploy(tmp_path / "d.yaml", "three", {"connectors.other": {"name": "mooncake_te", "extra": {"a": 1}}})
    write_deploy(path, "three", {"connectors.edge.extra": {"ttl_s": 60}})
    edges = read_deployment(path).edges
    assert set(edges) == {Edge("0", "1"), Edge("1", "2")}
    assert edges[Edge("0", "1")].extra == {"ttl_s": 60}


@pytest.mark.parametrize(
    ("changes", "readers"),
    [
        ({}, 1),
        ({"stages.1.engine_extras.pipeline_parallel_size": 2}, 2),
        ({"pipeline_parallel_size": 2}, 2),
        ({"stages.1.engine_extras.pipeline_parallel_size": 2, "async_chunk": True}, 1),
        ({"stages.1.engine_extras.pipeline_parallel_size": 2, "async_chunk": True, "stages.1.async_chunk": False}, 2),
    ],
)
def test_readers_of_a_pipeline_parallel_stage(tmp_path: Path, changes: dict[str, Any], readers: int) -> None:
    edges = read_deployment(write_deploy(tmp_path / "d.yaml", "three", changes)).edges
    assert edges[Edge("0", "1")].readers == readers
    assert edges[Edge("0", "1")].chunks == (
        changes.get("async_chunk", False) and changes.get("stages.1.async_chunk", True)
    )


def other_edge(name: str) -> dict[str, Any]:
    return {
        "connectors.other": {"name": name, "extra": {}},
        "stages.1.output_connectors": {"to_stage_2": "other"},
        "stages.2.input_connectors": {"from_stage_1": "other"},
    }


def test_a_stage_between_ours_and_a_built_in_connector_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stage 1 takes from 0->1 over shared_memory and sends to 1->2 over Shared"):
        check_deploy_file(write_deploy(tmp_path / "d.yaml", "three", other_edge("SharedMemoryConnector")))
    # the other way round, too
    changes = {**other_edge("shared_memory"), "connectors.edge.name": "SharedMemoryConnector"}
    with pytest.raises(ConfigError, match="one connector for both directions"):
        check_deploy_file(write_deploy(tmp_path / "d.yaml", "three", changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"stages.1.input_connectors": {"from_stage_0": "egde"}}, "did you mean 'edge'"),
        ({"stages.1.input_connectors": {"from_stage_7": "edge"}}, "there is no stage '7'"),
        ({"stages.1.input_connectors": {"from_stage_0": {"name": "memory", "extra": {}}}}, "disagree"),
        ({"connectors.edge.extra": {"role": "sender"}}, "role"),
        ({"connectors.edge.extra": {"tll_s": 3}}, "did you mean 'ttl_s'"),
        ({"connectors.edge.name": "shared_memry"}, "did you mean 'shared_memory'"),
    ],
)
def test_what_upstream_serves_in_silence_is_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    path = write_deploy(tmp_path / "d.yaml", "two", changes)
    assert text in "\n".join(map(str, faults_of(path)))
    assert f"{path}:" in str(faults_of(path)[0])


def test_edges_alone_are_refused_where_a_backend_of_ours_is_named(tmp_path: Path) -> None:
    changes = {"edges": [{"from": 0, "to": 2}], "connectors.edge.name": "shared_memory"}
    with pytest.raises(ConfigError, match="the edge 0->2 has no connector"):
        check_deploy_file(write_deploy(tmp_path / "d.yaml", "three", changes))


@pytest.mark.parametrize("path", sorted(UPSTREAM_DEPLOYS.glob("*.yaml")), ids=lambda path: path.stem)
def test_upstreams_own_deploy_files_start_with_drop_in(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DROP_IN_ENV, "1")
    check_deploy_file(path)


def test_check_of_all_files_that_upstream_brings() -> None:
    """One of them has edges alone, which upstream serves over its own connector; one is no deploy file."""
    paths = sorted(UPSTREAM_DEPLOYS.glob("*.yaml"))
    found = CliRunner().invoke(app, ["check", *map(str, paths)])
    assert [line.removeprefix(f"{UPSTREAM_DEPLOYS}/") for line in found.stdout.splitlines()] == [
        "hunyuan-image-3-mooncakeconnector.yaml:79: the edge 0->1 has no connector: name one in output_connectors of stage 0, "
        "or connector: {type: shared_memory} for all edges",
        "qwen3_tts_forced_aligner.yaml:12: stages is a list with at least one stage",
    ]


def test_a_stage_that_drop_in_divides_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {**other_edge("MoriTransferEngineConnector"), "connectors.edge.name": "SharedMemoryConnector"}
    path = write_deploy(tmp_path / "d.yaml", "three", changes)
    check_deploy_file(path)
    monkeypatch.setenv(DROP_IN_ENV, "SharedMemoryConnector")
    with pytest.raises(ConfigError, match="one connector for both directions"):
        check_deploy_file(path)


def test_built_in_options_are_understood_with_drop_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DROP_IN_ENV, "1")
    extra = {"shm_threshold_bytes": 65536, "codec_chunk_frames": 25, "mine": 1, "pipeline_options": ["mine"]}
    changes = {"connectors.edge": {"name": "SharedMemoryConnector", "extra": extra}}
    assert faults_of(write_deploy(tmp_path / "d.yaml", "two", changes)) == []


def test_drop_in_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drop_in_names() == {}
    monkeypatch.setenv(DROP_IN_ENV, "1")
    assert drop_in_names()["SharedMemoryConnector"] == "shared_memory"
    monkeypatch.setenv(DROP_IN_ENV, "SharedMemoryConnector")
    assert drop_in_names() == {"SharedMemoryConnector": "shared_memory"}
    monkeypatch.setenv(DROP_IN_ENV, "SharedMemoryConector")
    with pytest.raises(ConfigError, match="no installed backend can stand in"):
        drop_in_names()


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_a_plain_vllm_is_left_alone() -> None:
    code = """
import sys
from importlib.metadata import entry_points
[point] = entry_points(group="vllm.general_plugins", name="omni_connector")
point.load()()
print({name for name in ("torch", "vllm_omni", "omni_connector_core") if name in sys.modules} or "nothing")
"""
    assert run(code) == "nothing"


def test_registering_is_idempotent_and_imports_no_sdk() -> None:
    code = """
import sys, vllm_omni
from importlib.metadata import entry_points
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
before = set(sys.modules)
for group in ("vllm.general_plugins", "vllm_omni.general_plugins") * 2:
    [point] = entry_points(group=group, name="omni_connector")
    point.load()()
from omni_connector_core import plugin_manager
names = OmniConnectorFactory.list_registered_connectors()
assert set(plugin_manager.names()) <= set(names) and len(names) == len(set(names)), names
heavy = {"mooncake", "nixl", "yr"} & (set(sys.modules) - before)
loaded = [name for name in sys.modules if name.startswith("omni_connector_") and name.endswith(".transport")]
print(heavy, [name for name in loaded if name != "omni_connector_core.transport"])
"""
    assert run(code) == "set() []"


def test_drop_in_replaces_the_built_in_constructor() -> None:
    code = """
import vllm_omni
from vllm_omni.plugins import load_omni_general_plugins
load_omni_general_plugins()
from vllm_omni.distributed.omni_connectors import ConnectorSpec, OmniConnectorFactory
connector = OmniConnectorFactory.create_connector(ConnectorSpec("SharedMemoryConnector", {"stage_id": 0}))
print(type(connector).__name__, connector.health()["backend"])
"""
    assert run(code, **{DROP_IN_ENV: "1"}) == "ConnectorAdapter shared_memory"
    assert "ConnectorAdapter" not in run(code.replace('["backend"]', '["status"]'), **{DROP_IN_ENV: ""})

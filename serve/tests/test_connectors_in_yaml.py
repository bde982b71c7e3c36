"""The file alone decides what carries an edge, and the answer is the same."""

from __future__ import annotations

import base64
import importlib.resources
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from serving_process import Server, eventually, served, total

from omni_connector_core import plugin_manager
from omni_connector_serve.reference.single import generate

FILES = importlib.resources.files("omni_connector_serve.reference")
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "serving.md"


def without_daemons() -> list[str]:
    """Name the installed backends that two processes of one host can use as they are."""
    specs = map(plugin_manager.spec, plugin_manager.names())
    return [spec.name for spec in specs if spec.capabilities.cross_process and spec.sdk_present() and not spec.service]


def test_every_edge_over_another_connector(tmp_path: Path) -> None:
    names = without_daemons()
    if len(names) < 2:
        pytest.skip(f"only {names} can be used without a service")
    pipeline = yaml.safe_load((FILES / "pipeline.yaml").read_text())
    pipeline["connectors"] = {name: {"name": name} for name in names}
    stages = {stage["stage_id"]: stage for stage in pipeline["stages"]}
    carried = {}
    for number, edge in enumerate(pipeline.pop("edges"), start=1):
        name = names[number % len(names)]
        stages[edge["from"]].setdefault("output_connectors", {})[f"to_stage_{edge['to']}"] = name
        stages[edge["to"]].setdefault("input_connectors", {})[f"from_stage_{edge['from']}"] = name
        carried[f"{edge['from']}->{edge['to']}"] = name
    del pipeline["connector"]
    torch.set_num_threads(1)
    expected = generate(None, "all at once", max_tokens=16)
    with served(pipeline, tmp_path) as server:
        outputs = server.generate("all at once", params={"max_tokens": 16}).json()["outputs"]
        samples = server.samples()
        server.at_rest()
        again = after_a_rank_died_within_a_request(server)
    tokens, wav, _ = expected.as_outputs()
    assert (outputs["tokens"], base64.b64decode(outputs["audio"]["data"])) == (tokens, wav)
    assert again["tokens"] == tokens
    assert len(set(carried.values())) > 1
    for edge, name in carried.items():
        for counter in ("omni_connector_put_bytes_total", "omni_connector_get_bytes_total"):
            assert total(samples, counter, edge=edge, backend=name) > 0
            assert total(samples, counter, edge=edge) == total(samples, counter, edge=edge, backend=name)


def after_a_rank_died_within_a_request(server: Server) -> dict[str, Any]:
    """Kill one of prefill's two ranks while decode waits for the KV cache of both, then ask once more."""
    pid = server.stage("prefill")["pids"][1]
    os.kill(pid, signal.SIGSTOP)
    asked = server.start("all at once", params={"max_tokens": 16})
    eventually(lambda: server.stage("decode")["request_id"])
    os.kill(pid, signal.SIGKILL)
    error = asked.result().json()["error"]
    assert (error["stage"], error["cause"]) == ("prefill", f"its process {pid} (rank 1) was killed by SIGKILL")
    server.healthy()
    assert server.stage("decode")["restarts"] == 0
    outputs: dict[str, Any] = server.generate("all at once", params={"max_tokens": 16}).json()["outputs"]
    server.at_rest()
    return outputs


def test_the_documented_stages_and_file_work_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCUMENTATION.read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [file] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_stages.py").write_text(code)
    (tmp_path / "mine.yaml").write_text(file)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with served(tmp_path / "mine.yaml", tmp_path) as server:
        assert server.generate("hello").json()["outputs"] == {"letters": "HELLO!"}

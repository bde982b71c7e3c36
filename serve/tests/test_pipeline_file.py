"""Pipeline files: what is wrong with one is said with its line, before anything is started."""

from __future__ import annotations

import importlib.resources
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from omni_connector_core import ConfigError
from omni_connector_serve.runtime.load import load_pipeline, pipeline_faults

REFERENCE = (importlib.resources.files("omni_connector_serve.reference") / "pipeline.yaml").read_text()
GOOD = """\
pipeline: two
connector: {type: shared_memory, extra: {ttl_s: 60}}
stages:
  - stage_id: a
    class: acting_stages:Actor
  - stage_id: b
    class: acting_stages:Actor
    request: true
    tensor_parallel_size: 2
    options: {folder: /nowhere}
edges:
  - {from: a, to: b}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "pipeline.yaml"
    path.write_text(text)
    return path


def faults(folder: Path, text: str) -> list[str]:
    path = write(folder, text)
    return [str(fault).replace(str(path), "FILE") for fault in pipeline_faults(path)]


def test_a_good_file_becomes_stages_and_edges(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert pipeline_faults(path) == []
    pipeline = load_pipeline(path)
    assert list(pipeline.stages) == ["a", "b"]
    assert pipeline.stages["b"].options == {"folder": "/nowhere"}
    edges = {edge.name: (edge.backend, edge.options, edge.writers, edge.readers) for edge in pipeline.edges}
    assert edges == {
        "a->b": ("shared_memory", {"ttl_s": 60}, 1, 2),
        "request->a": ("shared_memory", {"ttl_s": 60}, 1, 1),
        "request->b": ("shared_memory", {"ttl_s": 60}, 1, 2),
        "b->response": ("shared_memory", {"ttl_s": 60}, 2, 1),
    }


def test_another_connector_takes_the_place_of_all(tmp_path: Path) -> None:
    pipeline = load_pipeline(write(tmp_path, GOOD), connector="shared_memory", options={"ttl_s": 5})
    assert {edge.options["ttl_s"] for edge in pipeline.edges} == {5}


def test_requests_and_responses_may_have_a_connector_of_their_own(tmp_path: Path) -> None:
    pipeline = load_pipeline(write(tmp_path, GOOD + "serve: {connector: {type: shared_memory, extra: {ttl_s: 9}}}\n"))
    assert {edge.name: edge.options["ttl_s"] for edge in pipeline.edges if edge.name != "a->b"} == {
        "request->a": 9,
        "request->b": 9,
        "b->response": 9,
    }


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("pipeline: two", "pipline: two", "FILE:1: unknown key 'pipline'; did you mean 'pipeline'?"),
        ("request: true", "requests: true", "FILE:8: stage 'b': unknown key 'requests'; did you mean 'request'?"),
        ("size: 2", "size: 0", "FILE:9: stage 'b': tensor_parallel_size: expected `int` >= 1, got 0"),
        ("size: 2", "size: two", "FILE:9: stage 'b': tensor_parallel_size: expected `int`, got `str`, got 'two'"),
        (
            "options: {folder: /nowhere}",
            "options: 3",
            "FILE:10: stage 'b': options: expected `object`, got `int`, got 3",
        ),
        ("    class: acting_stages:Actor\n    req", "    req", "FILE:6: stage 'b' needs its class"),
        ("acting_stages:Actor\n    req", "acting_stages\n    req", "FILE:7: stage 'b' needs its class"),
        (
            "acting_stages:Actor\n    req",
            "nowhere.at:All\n    req",
            "FILE:7: stage 'b': there is no module 'nowhere.at'",
        ),
        ("- stage_id: a", "- {stage_id: request}\n  - stage_id: a", "FILE:4: stage_id 'request' stands for the client"),
        ("{from: a, to: b}", "{from: a, to: b}\n  - {from: b, to: a}", "the edges go in a circle: a->b, b->a"),
        ("type: shared_memory", "type: memory", "FILE:2: memory stays within one process"),
        ("type: shared_memory", "type: shard_memory", "no backend 'shard_memory' is installed"),
        ("ttl_s: 60", "ttl: 60", "FILE:2: unknown option 'ttl'; did you mean 'ttl_s'?"),
        ("type: shared_memory", "type: shared_memory, role: sender", "'role' does not belong in a file"),
        ("{from: a, to: b}", "{from: a, to: c}", "there is no stage 'c'"),
    ],
)
def test_a_fault_is_named_with_its_line(tmp_path: Path, old: str, new: str, fault: str) -> None:
    assert old in GOOD
    found = faults(tmp_path, GOOD.replace(old, new, 1))
    assert any(line.startswith("FILE:") and fault in line for line in found), found
    with pytest.raises(ConfigError):
        load_pipeline(tmp_path / "pipeline.yaml")


def test_all_faults_are_found_in_one_go(tmp_path: Path) -> None:
    found = faults(tmp_path, GOOD.replace("request:", "reqest:").replace("size: 2", "size: -2") + "serve: {prot: 1}\n")
    assert len(found) == 3
    assert found[2] == "FILE:13: serve: unknown key 'prot'; did you mean 'port'?"


def test_serve_settings_are_checked(tmp_path: Path) -> None:
    for number, bad in enumerate(("port: 70000", "drain_s: 0", "max_requests: many", "connector: shared_memory")):
        folder = tmp_path / str(number)
        folder.mkdir()
        [fault] = faults(folder, GOOD + f"serve: {{{bad}}}\n")
        assert fault.startswith(f"FILE:13: serve: {bad.partition(':')[0]}: expected")


def test_check_prints_a_line_per_fault_and_fails(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(REFERENCE)
    bad.write_text(REFERENCE.replace("class:", "clas:").replace("to: decode", "to: decoder"))
    check = [sys.executable, "-m", "omni_connector_serve", "check"]
    passed = subprocess.run([*check, str(good)], capture_output=True, text=True)
    assert (passed.returncode, passed.stdout) == (0, f"{good}: ok\n")
    failed = subprocess.run([*check, str(good), str(bad)], capture_output=True, text=True)
    assert failed.returncode == 1
    lines = failed.stdout.splitlines()
    assert all(line.startswith(f"{bad}:") for line in lines)
    assert "there is no stage 'decoder'; did you mean 'decode'?" in lines[0]


def test_a_deploy_file_of_vllm_omni_is_checked_for_its_connectors(tmp_path: Path) -> None:
    deploy = """\
pipeline: tinyomni
async_chunk: false
connectors:
  edge: {name: shared_memory, extra: {ttl_s: 60}}
stages:
  - stage_id: 0
    max_num_seqs: 4
    output_connectors: {to_stage_1: edge}
  - stage_id: 1
    input_connectors: {from_stage_0: edge}
"""
    assert faults(tmp_path, deploy) == []
    [fault] = faults(tmp_path, deploy.replace("ttl_s", "tll_s"))
    assert fault.startswith("FILE:4: unknown option 'tll_s'; did you mean 'ttl_s'?")
    found = faults(tmp_path, deploy.replace("to_stage_1: edge", "to_stage_1: egde"))
    assert any("did you mean 'edge'?" in line for line in found)


def test_every_cut_of_a_file_is_a_fault_or_a_pipeline_but_no_crash(tmp_path: Path) -> None:
    lines = GOOD.splitlines(keepends=True)
    for start, stop in itertools.combinations(range(len(lines) + 1), 2):
        path = write(tmp_path, "".join(lines[:start] + lines[stop:]))
        if not pipeline_faults(path):
            load_pipeline(path)

"""The deploy file: what is read, and what every fault says."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from omni_connector_core import Edge, Role
from omni_connector_core.config import check_backends, ends_of, faults, load, open_ends, parse
from omni_connector_core.errors import ConfigError

GOOD = """\
async_chunk: true
connectors:
  fast: {name: memory, extra: {ttl_s: 60}}
stages:
  - stage_id: 0
    output_connectors: {to_stage_1: fast}
    devices: "0"
  - stage_id: 1
    input_connectors: {from_stage_0: fast}
    output_connectors: {to_stage_2: {name: memory}}
  - stage_id: 2
"""


def write(tmp_path: Path, text: str, name: str = "deploy.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_merge_keys_are_resolved_and_what_is_given_beside_them_wins(tmp_path: Path) -> None:
    text = GOOD.replace("connectors:\n", "connectors:\n  base: &base {name: memory, extra: {ttl_s: 7}}\n", 1)
    text = text.replace("fast: {name: memory, extra: {ttl_s: 60}}", "fast: {<<: *base, extra: {ttl_s: 60}}")
    edges = load(write(tmp_path, text)).edges
    assert {edge.connector.name: edge.connector.options for edge in edges if edge.edge == Edge("0", "1")} == {
        "memory": {"ttl_s": 60}
    }


def test_the_long_form_is_read(tmp_path: Path) -> None:
    config = load(write(tmp_path, GOOD))
    assert [stage.stage_id for stage in config.stages] == ["0", "1", "2"]
    assert {edge.edge: (edge.connector.name, edge.connector.options) for edge in config.edges} == {
        Edge("0", "1"): ("memory", {"ttl_s": 60}),
        Edge("1", "2"): ("memory", {}),
    }
    assert config.extra == {"async_chunk": True}
    assert config.stage(0).extra == {"devices": "0"}


def test_the_short_form_is_one_connector_on_every_edge(tmp_path: Path) -> None:
    text = "connector: {type: memory}\nedges: [{from: a, to: b}, {from: b, to: c}]\n"
    text += "stages: [{stage_id: a}, {stage_id: b}, {stage_id: c}]\n"
    config = load(write(tmp_path, text))
    assert [str(edge.edge) for edge in config.edges] == ["a->b", "b->c"]
    assert {edge.connector.name for edge in config.edges} == {"memory"}


def test_one_side_of_an_edge_is_enough_and_an_edge_of_its_own_wins_over_the_short_form() -> None:
    config = parse(
        {
            "connector": {"type": "memory"},
            "edges": [{"from": 0, "to": 1}],
            "stages": [{"stage_id": 0}, {"stage_id": 1, "input_connectors": {"from_stage_0": {"name": "other"}}}],
        }
    )
    assert [edge.connector.name for edge in config.edges] == ["other"]


def test_parsing_does_not_change_what_it_was_given() -> None:
    given = {
        "connectors": {"fast": {"name": "memory", "extra": {"ttl_s": 60}}},
        "stages": [{"stage_id": 0, "output_connectors": {"to_stage_1": "fast"}}, {"stage_id": 1}],
    }
    before = copy.deepcopy(given)
    config = parse(given)
    config.edges[0].connector.options["ttl_s"] = 1
    assert given == before


def test_an_overlay_wins_over_its_base(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "base.yaml")
    overlay = (
        "base_config: base.yaml\nconnectors:\n  fast: {extra: {ttl_s: 5}}\nstages:\n  - {stage_id: 1, devices: '3'}\n"
    )
    config = load(write(tmp_path, overlay))
    assert config.edges[0].connector.options == {"ttl_s": 5}
    assert config.stage("1").extra == {"devices": "3"}
    assert config.edges[0].connector.options_position["ttl_s"].line == 3
    assert [str(edge.edge) for edge in config.edges] == ["0->1", "1->2"]


FAULTS = {
    "a role": ("{name: memory, role: sender}", "deploy.yaml:3: connectors.fast: 'role' does not belong in a file"),
    "a role in extra": ("{name: memory, extra: {role: x}}", "deploy.yaml:3: connectors.fast: 'role' does not belong"),
    "an unknown key": ("{name: memory, extras: {}}", "unknown key 'extras'; did you mean 'extra'?"),
    "no name": ("{extra: {}}", "deploy.yaml:3: connectors.fast names its backend once"),
    "not a mapping": ("memory", "deploy.yaml:3: connectors.fast is a mapping"),
    "extra is a list": ("{name: memory, extra: [1]}", "extra is a mapping of options"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_definition_names_file_and_line(tmp_path: Path, fault: str) -> None:
    definition, message = FAULTS[fault]
    path = write(tmp_path, GOOD.replace("{name: memory, extra: {ttl_s: 60}}", definition))
    with pytest.raises(ConfigError, match=".") as caught:
        load(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "to_stage_1: fast",
            "to_stage_1: fats",
            "deploy.yaml:6: output_connectors.to_stage_1: there is no connector 'fats'",
        ),
        ("to_stage_1: fast", "to_stage_1: fats", "did you mean 'fast'?"),
        ("to_stage_1: fast", "to_stage_7: fast", "deploy.yaml:6: output_connectors: there is no stage '7'"),
        ("to_stage_1: fast", "stage_1: fast", "is not of the form to_stage_N; did you mean 'to_stage_1'?"),
        ("to_stage_1: fast", "to_stage_0: fast", "the edge 0->0 leads from a stage to itself"),
        (
            "to_stage_1: fast",
            "to_stage_1: {name: other}",
            "the two sides of edge 0->1 disagree: other at line 6, memory here",
        ),
        ("to_stage_1: fast", "to_stage_1: {name: memory, extra: {ttl_s: 5}}", "options ttl_s differ from line 6"),
        ("connectors:", "conectors:", "deploy.yaml:2: unknown key 'conectors'; did you mean 'connectors'?"),
        (
            "    input_connectors",
            "    input_connector",
            "unknown key 'input_connector'; did you mean 'input_connectors'?",
        ),
        ("stage_id: 2", "stage_id: 1", "a second stage with stage_id 1"),
        ("stages:", "edges: [{from: 0, to: 2}]\nstages:", "the edge 0->2 has no connector"),
        ("stages:", "edges: [{from: 0, to: 9}]\nstages:", "edges: there is no stage '9'"),
        ("stages:", "edges: [{from: 0}]\nstages:", "an edge is {from: STAGE, to: STAGE}"),
        ("async_chunk: true", "async_chunk: [", "deploy.yaml:3:"),
        ("async_chunk: true", "async_chunk: true\nasync_chunk: false", "'async_chunk' is given twice, first at line 1"),
    ],
)
def test_a_fault_between_parts_names_file_and_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, GOOD.replace(old, new)))
    assert message in str(caught.value)


def test_all_faults_are_found_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("to_stage_1: fast", "to_stage_7: fast").replace("{name: memory}", "{name: memory, role: x}")
    assert len(faults(write(tmp_path, text))) == 2


@pytest.mark.parametrize("text", ["", "[]", "stages: []", "stages: 3", "a: {b: c}\n"])
def test_a_file_without_stages_is_a_fault(tmp_path: Path, text: str) -> None:
    assert faults(write(tmp_path, text))


def test_a_missing_file_and_a_circle_of_bases_are_faults(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="leads back"):
        load(write(tmp_path, "base_config: deploy.yaml\n"))


def test_backends_and_their_options_are_checked_before_anything_starts(tmp_path: Path) -> None:
    text = GOOD.replace("ttl_s: 60", "ttl: 60").replace("{name: memory}", "{name: nosuch}")
    found = [str(fault) for fault in check_backends(load(write(tmp_path, text)))]
    assert len(found) == 2
    assert "deploy.yaml:3: unknown option 'ttl'; did you mean 'ttl_s'?" in found[0]
    assert "deploy.yaml:10: no backend 'nosuch' is installed" in found[1]


def test_the_ends_of_a_stage(tmp_path: Path) -> None:
    config = load(write(tmp_path, GOOD))
    assert [(str(end.edge), end.role) for end in ends_of(config, 1)] == [
        ("0->1", Role.CONSUMER),
        ("1->2", Role.PRODUCER),
    ]
    with pytest.raises(ConfigError, match="no stage '9'"):
        ends_of(config, "9")


def test_opened_ends_carry_payloads_between_stages(tmp_path: Path) -> None:
    config = load(write(tmp_path, GOOD))
    first, second = (open_ends(config, stage, namespace="test-open-ends") for stage in (0, 1))
    edge = Edge("0", "1")
    first[edge].put("r", {"x": 1})
    assert second[edge].get("r", timeout=5) == {"x": 1}
    for connector in [*first.values(), *second.values()]:
        connector.close()

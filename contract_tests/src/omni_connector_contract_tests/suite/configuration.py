"""Level 2: the backend named in a deploy file: loaded, checked, wired, with the file and line of every fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_connector_contract_tests.harness import deployment
from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.harness.ends import End, Ends
from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_contract_tests.suite.base import ContractTests
from omni_connector_core import ConfigError, OptionError
from omni_connector_core.config import check_backends, load, open_ends

__all__ = ["TestDeployFaults", "TestDeployFile"]


def write(folder: Path, document: Mapping[str, Any]) -> Path:
    """Write a deploy file."""
    path = folder / "deploy.yaml"
    path.write_text(yaml.safe_dump(dict(document)))
    return path


def long_form(backend: Backend, **options: Any) -> dict[str, Any]:
    """Return a pipeline of three stages that names its connector where vLLM-Omni does."""
    return {
        "connectors": {"between": {"name": backend.name, "extra": {**backend.config, **options}}},
        "stages": [
            {"stage_id": 0, "output_connectors": {"to_stage_1": "between"}},
            {
                "stage_id": 1,
                "input_connectors": {"from_stage_0": "between"},
                "output_connectors": {"to_stage_2": "between"},
            },
            {"stage_id": 2, "input_connectors": {"from_stage_1": "between"}},
        ],
    }


def short_form(backend: Backend, **options: Any) -> dict[str, Any]:
    """Return the same pipeline with one connector for all edges."""
    return {
        "connector": {"type": backend.name, "extra": {**backend.config, **options}},
        "stages": [{"stage_id": 0}, {"stage_id": 1}, {"stage_id": 2}],
        "edges": [{"from": 0, "to": 1}, {"from": 1, "to": 2}],
    }


FORMS = {"long": long_form, "short": short_form}


class TestDeployFile(ContractTests):
    """One file serves every process of a pipeline: each is told only which stage it is."""

    level = 2

    @pytest.fixture
    def stages(self, ends: Ends) -> Iterator[list[End]]:
        """Three processes that will be stages."""
        hosts = ("producer", "consumer", "second consumer")
        stages = [ends.open("both", on=host, edge=("no", "edge")) for host in hosts]
        yield stages
        for stage in stages:
            stage.act(deployment.close_stage)

    @pytest.mark.parametrize("form", FORMS)
    def test_a_file_wires_a_pipeline(self, ends: Ends, stages: list[End], tmp_path: Path, form: str) -> None:
        path = write(tmp_path, FORMS[form](ends.backend))
        roles = [
            stage.act(deployment.open_stage, path, str(n), namespace=ends.namespace) for n, stage in enumerate(stages)
        ]
        name = ends.backend.name
        assert roles == [
            {"0->1": ("producer", name)},
            {"0->1": ("consumer", name), "1->2": ("producer", name)},
            {"1->2": ("consumer", name)},
        ]
        payload = Bulk(300_000, seed=3)
        for there, here in ((0, 1), (1, 2)):
            stages[there].act(deployment.put_at_stage, "request", payload)
            found = stages[here].act(deployment.get_at_stage, "request")
            assert found == {f"{there}->{here}": fingerprint(payload)}

    def test_an_option_in_the_file_reaches_the_backend(self, ends: Ends, stages: list[End], tmp_path: Path) -> None:
        path = write(tmp_path, long_form(ends.backend, ttl_s=0.125, timeout_s=7))
        stages[1].act(deployment.open_stage, path, "1", namespace=ends.namespace)
        assert stages[1].act(deployment.options_at_stage, "ttl_s") == {0.125}
        assert stages[1].act(deployment.options_at_stage, "timeout_s") == {7.0}

    def test_two_deployments_of_one_file_do_not_meet(self, ends: Ends, stages: list[End], tmp_path: Path) -> None:
        path = write(tmp_path, short_form(ends.backend, timeout_s=0.3))
        stages[0].act(deployment.open_stage, path, "0", namespace=ends.namespace)
        stages[1].act(deployment.open_stage, path, "1", namespace=ends.namespace + "-other")
        stages[2].act(deployment.open_stage, path, "1", namespace=ends.namespace)
        stages[0].act(deployment.put_at_stage, "request", 1)
        with pytest.raises(TimeoutError):
            stages[1].act(deployment.get_at_stage, "request")
        assert stages[2].act(deployment.get_at_stage, "request") == {"0->1": fingerprint(1)}

    def test_two_ranks_of_a_stage_are_told_apart(self, ends: Ends, stages: list[End], tmp_path: Path) -> None:
        path = write(tmp_path, short_form(ends.backend))
        for rank in (0, 1):
            stages[rank].act(deployment.open_stage, path, "0", namespace=ends.namespace, rank=rank)
        stages[2].act(deployment.open_stage, path, "1", namespace=ends.namespace)
        metadata = [stages[rank].act(deployment.put_at_stage, "request", rank)["0->1"] for rank in (0, 1)]
        assert [entry["producer"] for entry in metadata] == [[0, 0], [0, 1]]
        assert ends.open("consumer").get("request", metadata[1]) == 1
        assert stages[2].act(deployment.get_at_stage, "request") == {"0->1": fingerprint(0)}

    @pytest.mark.parametrize("form", FORMS)
    def test_a_good_file_has_no_faults(self, connector_backend: Backend, tmp_path: Path, form: str) -> None:
        config = load(write(tmp_path, FORMS[form](connector_backend)))
        assert check_backends(config) == []

    def test_opening_does_not_change_the_config(self, connector_backend: Backend, tmp_path: Path) -> None:
        config = load(write(tmp_path, long_form(connector_backend, ttl_s=3)))
        before = {edge.edge: dict(edge.connector.options) for edge in config.edges}
        for connector in open_ends(config, "1").values():
            connector.close()
        assert {edge.edge: edge.connector.options for edge in config.edges} == before


class TestDeployFaults(ContractTests):
    """Every fault that this backend can be part of is found before anything is opened, with its line."""

    level = 2

    def test_an_unknown_option_is_found_with_its_line(self, connector_backend: Backend, tmp_path: Path) -> None:
        path = write(tmp_path, long_form(connector_backend, ttl=3))
        [line] = [n for n, text in enumerate(path.read_text().splitlines(), 1) if "ttl: 3" in text]
        [fault] = check_backends(load(path))
        assert f"{path}:{line}" in str(fault)
        assert "'ttl'" in str(fault)
        assert "did you mean 'ttl_s'" in str(fault)

    def test_a_bad_value_is_found_with_its_line(self, connector_backend: Backend, tmp_path: Path) -> None:
        path = write(tmp_path, short_form(connector_backend, timeout_s="soon"))
        [fault] = check_backends(load(path))
        assert f"{path}:" in str(fault)
        assert "timeout_s" in str(fault)

    def test_an_unknown_option_is_refused_when_opened_and_nothing_stays_open(self, ends: Ends, tmp_path: Path) -> None:
        path = write(tmp_path, long_form(ends.backend, ttl=3))
        stage = ends.open("both", on="producer", edge=("no", "edge"))
        with pytest.raises(OptionError, match="ttl_s"):
            stage.act(deployment.open_stage, path, "1", namespace=ends.namespace)

    def test_a_misspelt_backend_is_found_with_a_suggestion(self, connector_backend: Backend, tmp_path: Path) -> None:
        document = short_form(connector_backend)
        document["connector"]["type"] = connector_backend.name + "x"
        [fault] = check_backends(load(write(tmp_path, document)))
        assert f"did you mean {connector_backend.name!r}" in str(fault)

    def test_a_role_in_the_file_is_refused(self, connector_backend: Backend, tmp_path: Path) -> None:
        path = write(tmp_path, long_form(connector_backend, role="sender"))
        with pytest.raises(ConfigError, match=r"deploy\.yaml:\d+.*'role'"):
            load(path)

    def test_two_sides_that_disagree_are_refused(self, connector_backend: Backend, tmp_path: Path) -> None:
        document = long_form(connector_backend, ttl_s=60)
        other = {"name": connector_backend.name, "extra": {**connector_backend.config, "ttl_s": 61}}
        document["stages"][1]["input_connectors"] = {"from_stage_0": other}
        with pytest.raises(ConfigError, match="ttl_s"):
            load(write(tmp_path, document))

"""What each option of the shared-memory backend changes."""

import gc
import re
import sys
from pathlib import Path

import pytest
from shared_memory_edge import Edge

from omni_connector_contract_tests.observed import observes, unobserved
from omni_connector_core import BackendUnavailableError, OptionError, Role, create_connector
from omni_connector_core.options import option_table
from omni_connector_shared_memory.options import SharedMemoryOptions


@pytest.fixture
def edge(tmp_path: Path) -> Edge:
    return Edge(tmp_path / "run")


def pool_files() -> list[Path]:
    gc.collect()  # a view of an earlier test keeps its pool open
    links = {fd: fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.exists()}
    return [fd for fd, link in links.items() if "omni-connector-pool" in str(link)]


def test_every_option_has_a_test() -> None:
    assert unobserved(SharedMemoryOptions, sys.modules[__name__]) == []


@observes("pool_bytes")
def test_the_pool_grows_by_the_steps_that_were_asked_for(edge: Edge) -> None:
    with edge.open(Role.PRODUCER, {"pool_bytes": "3MiB"}) as producer:
        assert pool_files() == []
        producer.put("k", 1)
        assert {file.stat().st_blocks * 512 for file in pool_files()} == {3 << 20}
    assert pool_files() == []


@observes("pool_dir")
def test_the_pool_lies_in_the_folder_that_was_asked_for(edge: Edge, tmp_path: Path) -> None:
    with edge.open(Role.PRODUCER, {"pool_dir": "/dev/shm"}) as producer:
        producer.put("k", 1)
        maps = Path("/proc/self/maps").read_text()
        assert re.search(r" /dev/shm/\S+ \(deleted\)", maps)
    with edge.open(Role.PRODUCER, {"pool_dir": str(tmp_path / "missing")}) as producer:
        with pytest.raises(BackendUnavailableError, match="missing"):
            producer.put("k", 1)
        assert edge.files() == []


@observes("runtime_dir")
def test_the_runtime_folder_is_the_one_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_CONNECTOR_RUNTIME_DIR", str(tmp_path / "env"))
    with create_connector("shared_memory", {}) as by_environment:
        by_environment.put("k", 1)
        assert len(list((tmp_path / "env").iterdir())) == 2
        with create_connector("shared_memory", {"runtime_dir": str(tmp_path / "option")}) as by_option:
            by_option.put("k", 1)
            assert len(list((tmp_path / "option").iterdir())) == 2
    assert list((tmp_path / "env").iterdir()) == []


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(OptionError, match="pool_byte.*did you mean 'pool_bytes'"):
        create_connector("shared_memory", {"pool_byte": 1})


def test_the_readme_has_the_option_table() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert option_table(SharedMemoryOptions) in readme

# SPDX-License-Identifier: Apache-2.0
"""The vLLM-Omni tests run in `.venv-vllm` (`make vllm-env`); where vllm-omni is not installed there is nothing to collect."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm_omni") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give a case the time to start a server of four processes on two busy cores."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint that every pipeline of the rig serves."""
    directory = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, "-m", "omni_cpu_rig.checkpoint", str(directory)], check=True)
    return directory


@pytest.fixture(scope="session")
def mixture_of_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the pipeline tinyomni_moe."""
    directory = tmp_path_factory.mktemp("moe")
    subprocess.run([sys.executable, "-m", "omni_cpu_rig.checkpoint", str(directory), "--moe"], check=True)
    return directory


@pytest.fixture(scope="session")
def serve(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``with serve("two", {"async_chunk": True}) as server:``: leaving it fails if anything is left behind.

    ``killed=True`` says that the test kills processes of the server; `checkpoint` is what it serves, if not `model`.
    """
    from omni_server import Server, wait_until, write_deploy

    @contextlib.contextmanager
    def serve(
        base: str,
        changes: Mapping[str, Any] | None = None,
        *,
        upstream: str | None = None,
        environment: Mapping[str, str] | None = None,
        killed: bool = False,
        checkpoint: Path = model,
        **options: Any,
    ) -> Iterator[Server]:
        directory = tmp_path_factory.mktemp(base)
        deploy = write_deploy(directory / "deploy.yaml", base, changes, upstream=upstream)
        before = names_in("/dev/shm")
        runtime_dir = tempfile.mkdtemp(prefix="oc-")  # short: the paths of Unix sockets are limited
        ours = {"OMNI_CONNECTOR_RUNTIME_DIR": runtime_dir}
        server = Server(deploy, checkpoint, directory, environment={**ours, **(environment or {})}, **options)
        with server:
            yield server
        assert server.left_behind == []
        wait_until(
            lambda: not unused(names_in("/dev/shm") - before), 60, f"shared memory stays: {names_in('/dev/shm')}"
        )
        # vLLM kills an engine whose workers take more than five seconds to go; the socket of a killed process stays, for the
        # next one of its edge to remove.
        if not killed and not any("force killing remaining process" in line for line in server.lines()):
            assert names_in(runtime_dir) == set()
        shutil.rmtree(runtime_dir)

    return serve


def names_in(directory: str) -> set[str]:
    """Files in a directory, without what vLLM's own processes share (their queues, a CPU's all-reduce)."""
    return {
        path.name
        for path in Path(directory).iterdir()
        if not path.name.startswith(("psm_", "sem.", "vllm_dist_")) and not path.is_dir()
    }


def unused(names: set[str]) -> set[str]:
    """Those in /dev/shm that no living process has: another server, of a test beside this one, may well have its own."""
    if not names:
        return names
    used = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            opened = [file.path for file in process.open_files()]
            used |= {name for name in names if f"/dev/shm/{name}" in maps or f"/dev/shm/{name}" in opened}
    return names - used

"""vLLM-Omni's own connectors, and its SharedMemoryConnector measured as ours are.

It runs from the files of its wheel. Where vLLM itself is not installed its modules cannot be imported whole; then the
connector's file, its base class, its serialiser and the functions that read and write shared memory are loaded from the wheel
as they are, and only what they import but do not use here (types to test against, platform detection) is stood in for.
"""

from __future__ import annotations

import importlib
import os
import statistics
import subprocess
import sys
import types
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omni_connector_contract_tests.bench.one_way import PATIENCE_S, OneWay, get_loop, payload_of, put_loop
from omni_connector_contract_tests.harness.peers import Peers
from omni_connector_contract_tests.harness.worker import Run

__all__ = ["VERSION", "fetch", "load", "measure_upstream"]

VERSION = "0.30.0"
CONNECTORS = "vllm_omni.distributed.omni_connectors.connectors"


def fetch(folder: Path) -> Path:
    """Install the wheel without its dependencies into a folder, once."""
    if not (folder / "vllm_omni").exists():
        package = f"vllm_omni=={VERSION}"
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), package]
        subprocess.run(command, check=True)
    return folder


def measure_upstream(folder: Path, nbytes: int, rounds: int) -> OneWay:
    """Measure one size between two fresh processes, as `measure_one_way` does."""
    peers = Peers(processes=True, patience_s=PATIENCE_S)
    prefix = f"bench-{os.getpid()}-{nbytes}-"
    try:
        getting = peers.get("consumer").start(Run(None, _get_all, (folder, prefix, rounds, nbytes), {}))
        putting = peers.get("producer").start(Run(None, _put_all, (folder, prefix, rounds, nbytes), {}))
        started_s, put_s, memcpy_s = putting.result()
        got_s = getting.result()
    finally:
        peers.shutdown()
    warm = rounds // 5
    times = [got - started for started, got in zip(started_s, got_s, strict=True)]
    median = statistics.median
    return OneWay(nbytes, median(times[warm:]), median(put_s[warm:]), median(memcpy_s[warm:]))


def _put_all(folder: Path, prefix: str, rounds: int, nbytes: int) -> tuple[list[float], list[float], list[float]]:
    connector, payload = _connector(folder), payload_of(nbytes)

    def put(n: int) -> None:
        done, _, _ = connector.put("0", "1", f"{prefix}{n}", payload)
        assert done

    def wait_read(n: int) -> None:
        while os.path.exists(f"/dev/shm/{prefix}{n}"):
            os.sched_yield()

    return put_loop(rounds, nbytes, put=put, wait_read=wait_read)


def _get_all(folder: Path, prefix: str, rounds: int, nbytes: int) -> list[float]:
    connector = _connector(folder)

    def get(n: int) -> Any:
        while (found := connector.get("0", "1", f"{prefix}{n}")) is None:  # it cannot wait: polling is the fastest
            pass
        return found[0]

    return get_loop(rounds, nbytes, get=get)


def load(folder: Path, connector: str, **stand_ins: Mapping[str, Any]) -> Any:
    """Import a connector's module from the wheel.

    Parameters
    ----------
    connector
        The module's name among vLLM-Omni's connectors.
    stand_ins
        By module (``__`` for a dot): attributes of modules of vLLM that it imports, for where vLLM is not installed.
    """
    if find_spec("vllm") is None:
        _stand_in(folder, {name.replace("__", "."): attributes for name, attributes in stand_ins.items()})
    else:
        sys.path.insert(0, str(folder))
    return importlib.import_module(f"{CONNECTORS}.{connector}")


def _connector(folder: Path) -> Any:
    return load(folder, "shm_connector").SharedMemoryConnector({"stage_id": 0})


def _stand_in(folder: Path, stand_ins: Mapping[str, Mapping[str, Any]]) -> None:
    for name in (
        "vllm_omni",
        "vllm_omni.entrypoints",
        "vllm_omni.distributed",
        "vllm_omni.distributed.omni_connectors",
        "vllm_omni.distributed.omni_connectors.connectors",
        "vllm_omni.distributed.omni_connectors.utils",
    ):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]  # its modules are found, its __init__ is not run
        sys.modules[name] = package
    unused: dict[str, Mapping[str, Any]] = {
        "vllm": {},
        "vllm.outputs": {"CompletionOutput": type("CompletionOutput", (), {}), "RequestOutput": type("R", (), {})},
        "vllm_omni.config": {},
        "vllm_omni.config.yaml_util": {"to_dict": dict},
        "vllm_omni.platforms": {"current_omni_platform": None},
        **stand_ins,
    }
    for name, attributes in unused.items():
        module = types.ModuleType(name)
        module.__dict__.update(attributes)
        sys.modules[name] = module

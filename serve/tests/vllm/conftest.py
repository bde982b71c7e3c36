# SPDX-License-Identifier: Apache-2.0
"""The vLLM-Omni tests run in `.venv-vllm` (`make vllm-env`); where vllm-omni is not installed there is nothing to collect."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm_omni") else ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint that every pipeline of the rig serves."""
    directory = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, "-m", "omni_cpu_rig.checkpoint", str(directory)], check=True)
    return directory

# SPDX-License-Identifier: Apache-2.0
"""What a fork server imports: everything that a stage needs, but no vendor's SDK, whose threads would not be there after a fork."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from setproctitle import getproctitle

_SDKS: dict[str, Any] = {"mooncake": None, "nixl": None, "yr": None}  # None: cannot be imported, though vllm-omni tries

sys.modules.update(_SDKS)
for _name in (
    "vllm.entrypoints.cli.main",
    "vllm_omni.engine.stage_engine_core_proc",
    "vllm_omni.worker.gpu_ar_model_runner",
    "vllm_omni.worker.gpu_generation_model_runner",
    "vllm_omni.diffusion.worker.diffusion_worker",
):
    import_module(_name)
for _name in _SDKS:
    del sys.modules[_name]

getproctitle()  # it looks for the place of the title in the environment, as long as that is in its place
import_module("omni_cpu_rig.forking").pass_environment()

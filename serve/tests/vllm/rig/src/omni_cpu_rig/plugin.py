# SPDX-License-Identifier: Apache-2.0
"""Entry points that vllm and vllm-omni call in every process; registering twice is harmless."""

from __future__ import annotations

import functools
import os
from pathlib import Path


def platform() -> str | None:
    """Name the CPU platform, where vllm itself runs on a CPU."""
    from vllm.platforms import current_platform

    return "omni_cpu_rig.platform.CpuOmniPlatform" if current_platform.is_cpu() else None


@functools.cache
def register() -> None:
    """Register the models and pipelines; the environment may ask for more.

    ``OMNI_CPU_RIG_FORK=1`` forks stages and workers; ``OMNI_CPU_RIG_MOE=1`` repairs expert parallelism on a CPU;
    ``OMNI_CPU_RIG_TIMING=DIRECTORY`` times the connectors.
    """
    from omni_cpu_rig.frontends import load_plugins_in_frontends
    from omni_cpu_rig.holding import hold_requests
    from omni_cpu_rig.pipelines import register_pipelines

    register_pipelines()
    hold_requests()
    load_plugins_in_frontends()
    if os.environ.get("OMNI_CPU_RIG_FORK") == "1":
        from omni_cpu_rig.forking import fork_what_is_spawned

        fork_what_is_spawned()
    if os.environ.get("OMNI_CPU_RIG_MOE") == "1":
        from omni_cpu_rig.expert_parallel import use_local_expert_ids

        use_local_expert_ids()
    if directory := os.environ.get("OMNI_CPU_RIG_TIMING"):
        from omni_cpu_rig.timing import time_connectors

        time_connectors(Path(directory))

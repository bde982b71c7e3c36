# SPDX-License-Identifier: Apache-2.0
"""Entry points that vllm and vllm-omni call in every process; registering twice is harmless."""

from __future__ import annotations

import functools
import os


def platform() -> str | None:
    """Name the CPU platform, where vllm itself runs on a CPU."""
    from vllm.platforms import current_platform

    return "omni_cpu_rig.platform.CpuOmniPlatform" if current_platform.is_cpu() else None


@functools.cache
def register() -> None:
    """Register the models and pipelines; ``OMNI_CPU_RIG_MOE=1`` also repairs expert parallelism on a CPU."""
    from omni_cpu_rig.pipelines import register_pipelines

    register_pipelines()
    if os.environ.get("OMNI_CPU_RIG_MOE") == "1":
        from omni_cpu_rig.expert_parallel import use_local_expert_ids

        use_local_expert_ids()

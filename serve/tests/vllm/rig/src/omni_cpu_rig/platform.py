# SPDX-License-Identifier: Apache-2.0
"""The CPU as a vllm-omni platform."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

_LOGICAL_DEVICES = 16


class CpuOmniPlatform(OmniPlatform, CpuPlatform):  # type: ignore[misc]
    """A platform of 16 logical devices that all are the host's CPU."""

    _omni_enum = OmniPlatformEnum.OOT
    # vllm's CpuPlatform names CPU_VISIBLE_MEMORY_NODES here: `devices: "1"` on a one-node machine would leave the worker
    # an empty node list. Any other name makes `devices` a label (and the number of vllm-omni's initialisation lock).
    device_control_env_var = "OMNI_CPU_RIG_DEVICES"

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return "omni_cpu_rig.workers.CpuARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return "omni_cpu_rig.workers.CpuGenerationWorker"

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        return "omni_cpu_rig.diffusion_worker.CpuDiffusionWorker"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum

        return str(DiffusionAttentionBackendEnum.TORCH_SDPA.get_path())

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def supports_talker_mtp_graph_capture(cls) -> bool:
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return _LOGICAL_DEVICES

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def set_device(cls, device: Any) -> None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        return None

    @classmethod
    def empty_cache(cls) -> None:
        return None

    @classmethod
    def get_free_memory(cls, device: Any = None) -> int:
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    @classmethod
    def reset_peak_memory_stats(cls, device: Any = None) -> None:
        return None

    @classmethod
    def max_memory_reserved(cls, device: Any = None) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls, device: Any = None) -> int:
        return 0

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        return 0.0

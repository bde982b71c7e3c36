# SPDX-License-Identifier: Apache-2.0
"""CPU workers for language-model and generation stages: vllm's CPU worker with vllm-omni's runners."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner, _torch_cuda_wrapper
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin


class _OnCpu:
    """Builds a GPU runner without CUDA streams, and makes its `.gpu` buffers the `.cpu` ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _torch_cuda_wrapper():
            super().__init__(*args, **kwargs)
        self._postprocess_tensors()  # type: ignore[attr-defined]  # again: vllm-omni adds buffers after CPUModelRunner's


class CpuARModelRunner(_OnCpu, GPUARModelRunner, CPUModelRunner):  # type: ignore[misc]
    def sync_and_gather_intermediate_tensors(self, num_tokens: int, intermediate_tensors: Any, sync_self: bool) -> Any:
        # Pipeline parallel: the receive buffer is normally made by the warm-up, which does not run here.
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return super().sync_and_gather_intermediate_tensors(num_tokens, intermediate_tensors, sync_self)


class CpuGenerationModelRunner(_OnCpu, GPUGenerationModelRunner, CPUModelRunner):  # type: ignore[misc]
    pass


class _CpuOmniWorker(OmniWorkerMixin, CPUWorker):  # type: ignore[misc]
    model_runner_cls: type

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = self.model_runner_cls(self.vllm_config, self.device)

    def _should_warm_up_model(self) -> bool:
        return False


class CpuARWorker(_CpuOmniWorker):
    model_runner_cls = CpuARModelRunner


class CpuGenerationWorker(_CpuOmniWorker):
    model_runner_cls = CpuGenerationModelRunner

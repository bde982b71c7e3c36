# SPDX-License-Identifier: Apache-2.0
"""The CPU worker of a diffusion stage. Apart from ``workers`` because it needs diffusers, which other stages do not."""

from __future__ import annotations

from typing import Any

from vllm_omni.diffusion.worker import diffusion_worker


class CpuDiffusionWorker(diffusion_worker.DiffusionWorker):  # type: ignore[misc]
    """vllm-omni's worker as it is."""


def _pack_outputs(self: Any) -> None:
    """`WorkerProc._async_output_loop` without a CUDA stream.

    The original starts with ``torch.accelerator.current_accelerator().type``, which is None.type on a CPU: its thread
    dies, and an engine of more than one worker waits for its warm-up output for ever.
    """
    while (item := self._async_output_queue.get()) is not None:
        output, output_id, _ = item
        common = {"kind": diffusion_worker.AsyncOutputKind.OUTPUT_READY, "async_output_id": output_id}
        try:
            diffusion_worker.pack_diffusion_output_shm(output)
            self._enqueue_result(diffusion_worker.AsyncDiffusionOutput(output=output, **common))
        except (OSError, RuntimeError, ValueError) as error:
            self._enqueue_result(diffusion_worker.AsyncDiffusionOutput(error=f"packing failed: {error}", **common))
        finally:
            with self._async_output_done:
                self._async_output_pending = max(0, self._async_output_pending - 1)
                self._async_output_done.notify_all()


diffusion_worker.WorkerProc._async_output_loop = _pack_outputs

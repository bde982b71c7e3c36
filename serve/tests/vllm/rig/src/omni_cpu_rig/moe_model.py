# SPDX-License-Identifier: Apache-2.0
"""The thinker as a mixture of experts."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from omni_cpu_rig.models import with_hidden


class ThinkerMoe(Qwen3MoeForCausalLM):  # type: ignore[misc]
    """A Qwen3-MoE that hands out its hidden states."""

    have_multimodal_outputs = True

    def forward(
        self, input_ids: Any, positions: Any, intermediate_tensors: Any = None, inputs_embeds: Any = None, **_: Any
    ) -> Any:
        return with_hidden(super().forward(input_ids, positions, intermediate_tensors, inputs_embeds))

# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism on a CPU.

vLLM 0.30.0's fused CPU experts ignore ``expert_map``: they are called with global expert ids and read past the local
weights. Mapping to local ids, with weight 0 for the others, makes the all-reduce add up the halves.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def use_local_expert_ids() -> None:
    """Replace ``CPUUnquantizedExperts.apply`` by one that honours ``expert_map``."""
    original = CPUUnquantizedExperts.apply

    def apply(
        self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any,
        activation: Any, global_num_experts: int, expert_map: Any, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if expert_map is not None:
            local_ids = expert_map.to(topk_ids.device)[topk_ids.long()]
            topk_weights = torch.where(local_ids < 0, torch.zeros_like(topk_weights), topk_weights)
            topk_ids = local_ids.clamp(min=0).to(topk_ids.dtype)
        return original(
            self, output, hidden_states, w1, w2, topk_weights, topk_ids,
            activation, global_num_experts, expert_map, *args, **kwargs,
        )  # fmt: skip

    CPUUnquantizedExperts.apply = apply

# SPDX-License-Identifier: Apache-2.0
"""A 'diffusion' stage whose audio is one level, computed from the received condition and KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from vllm_omni.diffusion.data import DiffusionOutput

_SAMPLES = 2400


class TinyDiTPipeline(nn.Module):
    """Emits ``tanh(mean(condition) + mean(first key layer))``."""

    weights_sources = ()
    support_audio_output = True
    audio_sample_rate = 24_000

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.od_config = od_config
        self.device = torch.device("cpu")

    def load_weights(self, weights: Iterable[Any]) -> set[str]:
        for _ in weights:
            pass
        return set()

    def forward(self, batch: Any, **_: Any) -> Any:
        outputs = [DiffusionOutput(output=torch.full((1, _SAMPLES), _level(request))) for request in batch.requests]
        return outputs if len(outputs) > 1 else outputs[0]


def _level(request: Any) -> float:
    level = torch.zeros(())
    info = request.prompt.get("additional_information", {}) if isinstance(request.prompt, dict) else {}
    if isinstance(condition := info.get("cond"), torch.Tensor):
        level += condition.float().mean()
    if (kv := getattr(request, "past_key_values", None)) is not None:
        level += kv.key_cache[0].float().mean()
    return float(torch.tanh(level))


def keep_output(od_config: Any) -> Callable[..., Any]:
    """The stage's post-processing: none."""

    def keep(output: Any, output_type: str = "np", **_: Any) -> Any:
        return output

    return keep

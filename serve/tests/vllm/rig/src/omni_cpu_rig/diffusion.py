# SPDX-License-Identifier: Apache-2.0
"""A 'diffusion' stage whose audio is computed from the received condition and KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from vllm_omni.diffusion.data import DiffusionOutput

_SAMPLES = 2400


class TinyDiTPipeline(nn.Module):
    """Emits a wave in which every token and head of the received KV cache can be heard."""

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
        outputs = [DiffusionOutput(output=_wave(request)) for request in batch.requests]
        return outputs if len(outputs) > 1 else outputs[0]


def _wave(request: Any) -> torch.Tensor:
    """The mean of the condition plus that of each token's keys and values in each head and layer, one after the other.

    To two decimals: tensor parallel stages add up in another order, and CPUs differ in the last bits.
    """
    info = request.prompt.get("additional_information", {}) if isinstance(request.prompt, dict) else {}
    condition = info.get("cond")
    level = condition.float().mean() if isinstance(condition, torch.Tensor) else torch.zeros(())
    levels = torch.zeros(1)
    if (kv := getattr(request, "past_key_values", None)) is not None:
        layers = [layer for pair in zip(kv.key_cache, kv.value_cache, strict=True) for layer in pair]
        levels = torch.cat([layer.float().mean(-1).flatten() for layer in layers])
    wave = torch.tanh(level + levels).mul(100).round().div(100)
    return wave.repeat(_SAMPLES // levels.numel() + 1)[:_SAMPLES].unsqueeze(0)


def keep_output(od_config: Any) -> Callable[..., Any]:
    """The stage's post-processing: none."""

    def keep(output: Any, output_type: str = "np", **_: Any) -> Any:
        return output

    return keep

# SPDX-License-Identifier: Apache-2.0
"""The networks of the language-model and waveform stages. Each output depends on what came over the connector."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm_omni.model_executor.models.output_templates import OmniOutput

SAMPLE_RATE = 24_000
_SAMPLES_PER_TOKEN = 240


def received_hidden(info: dict[str, Any]) -> torch.Tensor | None:
    """The hidden states in a request's received payload, if it has any."""
    hidden = (info.get("hidden_states") or {}).get("output")
    return hidden if isinstance(hidden, torch.Tensor) and hidden.numel() else None


def with_hidden(hidden: Any) -> Any:
    """A model's output; what a pipeline-parallel rank before the last returns passes through."""
    return OmniOutput(text_hidden_states=hidden, multimodal_outputs={}) if isinstance(hidden, torch.Tensor) else hidden


class Thinker(Qwen2ForCausalLM):  # type: ignore[misc]
    """A Qwen2 that hands out its hidden states."""

    have_multimodal_outputs = True

    def forward(
        self, input_ids: Any, positions: Any, intermediate_tensors: Any = None, inputs_embeds: Any = None, **_: Any
    ) -> Any:
        return with_hidden(super().forward(input_ids, positions, intermediate_tensors, inputs_embeds))


class Talker(Qwen2ForCausalLM):  # type: ignore[misc]
    """A Qwen2 that adds the mean of the received hidden states to its own."""

    have_multimodal_outputs = True
    has_preprocess = False
    enable_update_additional_information = True

    def forward(
        self, input_ids: Any, positions: Any, intermediate_tensors: Any = None, inputs_embeds: Any = None, **kwargs: Any
    ) -> Any:
        hidden = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        if isinstance(hidden, torch.Tensor):
            infos = kwargs.get("model_intermediate_buffer") or []
            for info, (start, stop) in zip(infos, kwargs.get("request_token_spans") or [], strict=False):
                if (received := received_hidden(info)) is not None:
                    hidden[start:stop] += received.to(hidden.dtype).mean(0, keepdim=True)
        return with_hidden(hidden)


class Code2Wav(nn.Module):
    """A waveform computed from the received codes and hidden states; it has no weights."""

    have_multimodal_outputs = True
    has_preprocess = False
    enable_update_additional_information = True
    requires_request_ids = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.vllm_config = vllm_config
        self.hidden_size = vllm_config.model_config.get_hidden_size()

    def embed_input_ids(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.zeros((input_ids.shape[0], self.hidden_size), device=input_ids.device)

    def compute_logits(self, hidden_states: Any, sampling_metadata: Any = None) -> None:
        return None

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: Any = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        runtime_additional_information: list[dict[str, Any]] | None = None,
        model_intermediate_buffer: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> OmniOutput:
        ids = input_ids.reshape(-1).long()
        counts = kwargs.get("seq_token_counts") or [ids.numel()]
        infos = model_intermediate_buffer or runtime_additional_information or []
        infos = [*infos, *({} for _ in range(len(counts) - len(infos)))]
        waves = [_wave(tokens, received_hidden(info)) for tokens, info in zip(ids.split(counts), infos, strict=False)]
        rates = [torch.tensor(SAMPLE_RATE, dtype=torch.int32) for _ in waves]
        return OmniOutput(text_hidden_states=None, multimodal_outputs={"model_outputs": waves, "sr": rates})

    def load_weights(self, weights: Iterable[Any]) -> set[str]:
        for _ in weights:
            pass
        return set()


def _wave(tokens: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    wave = torch.sin(tokens.float().repeat_interleave(_SAMPLES_PER_TOKEN) * 0.01)
    if hidden is not None:
        n = tokens.numel()
        level = torch.tanh(hidden.float()[-n:].mean(-1))
        level = torch.nn.functional.pad(level, (0, max(0, n - level.numel())))[:n]
        wave = 0.5 * wave + 0.5 * level.repeat_interleave(_SAMPLES_PER_TOKEN)
    return wave.contiguous()

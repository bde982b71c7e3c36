# SPDX-License-Identifier: Apache-2.0
"""What crosses the connectors: vllm-omni calls these hooks, by name, to build payloads and the prompts that wait for them.

Parameter names are vllm-omni's: it passes them by keyword.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from vllm_omni.data_entry_keys import CodesStruct, HiddenStatesStruct, IdsStruct, MetaStruct, OmniPayloadStruct
from vllm_omni.inputs.data import OmniTokensPrompt

_TOKENS_PER_CHUNK = 4
# vllm-omni looks this name up in the module of a full-payload hook.
_FULL_PAYLOAD_REPLACE_KEYS: frozenset[str] = frozenset()


def _output_tokens(request: Any) -> list[int]:
    return [int(token) for token in request.output_token_ids if int(token) >= 0]


def _private(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.detach().float().cpu().contiguous()


def _placeholders(source_outputs: list[Any], token: int) -> list[Any]:
    return [
        OmniTokensPrompt(
            prompt_token_ids=[token] * max(1, len(source.outputs[0].cumulative_token_ids)),
            additional_information=None,
            multi_modal_data=None,
            mm_processor_kwargs=None,
        )
        for source in source_outputs
    ]


def placeholder_wav_prompt(
    source_outputs: list[Any], prompt: Any = None, requires_multimodal_data: bool = False
) -> list[Any]:
    """Tokens that hold the place of the codes; the payload brings the codes."""
    return _placeholders(source_outputs, 0)


def placeholder_talker_prompt(
    source_outputs: list[Any], prompt: Any = None, requires_multimodal_data: bool = False
) -> list[Any]:
    """The talker's prompt: as many tokens as the thinker made."""
    return _placeholders(source_outputs, 1)


def diffusion_prompt(
    source_outputs: list[Any], prompt: Any = None, requires_multimodal_data: bool = False, *_: Any, **__: Any
) -> list[Any]:
    """The prompt of the diffusion stage; its condition and KV cache come over the connector."""
    first = prompt[0] if isinstance(prompt, list) else prompt
    text = first.get("prompt") if isinstance(first, dict) else None
    return [{"prompt": text or "x", "additional_information": {}} for _ in source_outputs]


def codes_and_hidden_full_payload(transfer_manager: Any, pooling_output: Any, request: Any) -> dict[str, Any]:
    """The tokens as codes, and the hidden states, in one payload."""
    payload: dict[str, Any] = {
        "codes": {"audio": _output_tokens(request) or [0]},
        "meta": {"finished": torch.tensor(True)},
    }
    hidden = pooling_output.get("hidden") if isinstance(pooling_output, dict) else None
    if isinstance(hidden, torch.Tensor):
        payload["hidden_states"] = {"output": _private(hidden)}
    return payload


@functools.cache
def _bulk(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes // 4, dtype=torch.float32)


def _bulk_nbytes() -> int:
    """How much a request sends: what the file OMNI_CPU_RIG_PAYLOAD_FILE says now."""
    return int(Path(os.environ["OMNI_CPU_RIG_PAYLOAD_FILE"]).read_text())


def bulk_full_payload(transfer_manager: Any, pooling_output: Any, request: Any) -> dict[str, Any]:
    """``codes_and_hidden_full_payload`` plus as many bytes as the benchmark wants."""
    payload = codes_and_hidden_full_payload(transfer_manager, pooling_output, request)
    payload["bulk"] = {"data": _bulk(_bulk_nbytes())}
    return payload


def bulk_async_chunk(
    transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False
) -> OmniPayloadStruct | None:
    """``codes_async_chunk``; each of the four chunks brings a fourth of the bytes that the benchmark wants."""
    chunk = codes_async_chunk(transfer_manager, multimodal_output, request, is_finished)
    if chunk is not None and chunk.codes is not None:
        chunk.hidden_states = HiddenStatesStruct(output=_bulk(_bulk_nbytes() // 4).view(-1, 64))
    return chunk


def hidden_full_payload(transfer_manager: Any, pooling_output: Any, request: Any) -> dict[str, Any]:
    """The thinker's tokens and hidden states, for the talker."""
    return {"ids": {"output": _output_tokens(request)}, "hidden_states": {"output": _private(pooling_output["hidden"])}}


def condition_full_payload(transfer_manager: Any, pooling_output: Any, request: Any) -> dict[str, Any]:
    """The mean hidden state, as the condition of the diffusion stage."""
    return {"cond": _private(pooling_output["hidden"]).mean(0).contiguous()}


def codes_async_chunk(
    transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False
) -> OmniPayloadStruct | None:
    """Four codes a chunk, and the tail at the end."""
    sent = transfer_manager.code_prompt_token_ids[request.external_req_id]
    new = _output_tokens(request)[sum(len(chunk) for chunk in sent) :]
    if not is_finished and len(new) < _TOKENS_PER_CHUNK:
        return None
    meta = MetaStruct(finished=torch.tensor(bool(is_finished)))
    if not new:
        return OmniPayloadStruct(meta=meta) if is_finished else None
    sent.append(torch.tensor(new))
    return OmniPayloadStruct(codes=CodesStruct(audio=torch.tensor(new, dtype=torch.long)), meta=meta)


def hidden_async_chunk(
    transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False
) -> OmniPayloadStruct | None:
    """One chunk a step of the thinker: the hidden rows of that step."""
    outputs = multimodal_output if isinstance(multimodal_output, dict) else {}
    hidden = next((outputs[k] for k in ("hidden", "latent") if isinstance(outputs.get(k), torch.Tensor)), None)
    if hidden is None and not is_finished:
        return None
    return OmniPayloadStruct(
        hidden_states=None if hidden is None else HiddenStatesStruct(output=_private(hidden)),
        ids=IdsStruct(output=_output_tokens(request)),
        meta=MetaStruct(finished=torch.tensor(bool(is_finished))),
    )

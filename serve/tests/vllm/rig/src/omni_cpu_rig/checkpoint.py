# SPDX-License-Identifier: Apache-2.0
"""Write a tiny checkpoint: random weights (seed 0), a byte-level tokenizer, a chat template.

python -m omni_cpu_rig.checkpoint DIRECTORY [--moe]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "use_sliding_window": False,
}
_MOE_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "head_dim": 32,
    "attention_bias": False,
    "router_aux_loss_coef": 0.0,
}
_Random = Callable[..., torch.Tensor]


def write_checkpoint(directory: Path, *, moe: bool = False) -> None:
    """Write the checkpoint that every pipeline of the rig can serve.

    Parameters
    ----------
    directory
        Made if it does not exist.
    moe
        Write the mixture of experts, for ``tinyomni_moe``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(directory)
    end = vocabulary["<|im_end|>"]
    config = {
        **_CONFIG,
        **(_MOE_CONFIG if moe else {}),
        "vocab_size": len(vocabulary),
        "eos_token_id": end,
        "bos_token_id": vocabulary["<|endoftext|>"],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    weights = (_moe_weights if moe else _dense_weights)(config)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(directory: Path) -> dict[str, int]:
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *_SPECIAL]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return vocabulary


def _random(generator: torch.Generator) -> _Random:
    return lambda *shape, std=0.3: torch.randn(*shape, generator=generator) * std


# The order of the draws below is part of the expected audio: the tests compare its hash.
def _dense_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    random = _random(torch.Generator().manual_seed(0))
    weights = _outer_weights(random, hidden, vocabulary)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in "qkv":
            weights[f"{prefix}self_attn.{name}_proj.weight"] = random(hidden, hidden)
            weights[f"{prefix}self_attn.{name}_proj.bias"] = random(hidden)
        weights[f"{prefix}self_attn.o_proj.weight"] = random(hidden, hidden)
        weights |= _mlp_weights(random, f"{prefix}mlp.", hidden, inner)
        weights |= _norm_weights(prefix, hidden)
    return weights


def _moe_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    hidden, inner, vocabulary = config["hidden_size"], config["moe_intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    random = _random(torch.Generator().manual_seed(0))
    weights = _outer_weights(random, hidden, vocabulary)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in "qkv":
            weights[f"{prefix}self_attn.{name}_proj.weight"] = random(heads, hidden)
        weights[f"{prefix}self_attn.o_proj.weight"] = random(hidden, heads)
        for name in "qk":
            weights[f"{prefix}self_attn.{name}_norm.weight"] = torch.ones(config["head_dim"])
        weights[f"{prefix}mlp.gate.weight"] = random(config["num_experts"], hidden, std=1.0)
        for expert in range(config["num_experts"]):
            weights |= _mlp_weights(random, f"{prefix}mlp.experts.{expert}.", hidden, inner)
        weights |= _norm_weights(prefix, hidden)
    return weights


def _outer_weights(random: _Random, hidden: int, vocabulary: int) -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": random(vocabulary, hidden, std=1.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": random(vocabulary, hidden, std=1.0),
    }


def _mlp_weights(random: _Random, prefix: str, hidden: int, inner: int) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}gate_proj.weight": random(inner, hidden),
        f"{prefix}up_proj.weight": random(inner, hidden),
        f"{prefix}down_proj.weight": random(hidden, inner),
    }


def _norm_weights(prefix: str, hidden: int) -> dict[str, torch.Tensor]:
    names = ("input_layernorm", "post_attention_layernorm")
    return {f"{prefix}{name}.weight": torch.ones(hidden) for name in names}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--moe", action="store_true")
    arguments = parser.parse_args()
    write_checkpoint(arguments.directory, moe=arguments.moe)

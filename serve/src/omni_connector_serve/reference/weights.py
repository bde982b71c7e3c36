"""The reference model's shape, and weights that every process derives alike from the seed."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from omni_connector_serve.reference.exact import ACTIVATION_BITS


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the reference model. Sizes are counts unless the name says otherwise."""

    seed: int = 0
    image_size: int = 96
    patch_size: int = 16
    width: int = 128
    encoder_layers: int = 2
    decoder_layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_size: int = 16
    block_size: int = 16
    text_tokens: int = 256
    audio_tokens: int = 256
    max_positions: int = 2048
    oscillators: int = 8
    frame_samples: int = 480
    sample_rate_hz: int = 24_000
    tile_size: int = 16

    @property
    def patches(self) -> int:
        """Number of patches, and so of embeddings, of an image."""
        return (self.image_size // self.patch_size) ** 2


def weight(config: ModelConfig, name: str, fan_in: int, fan_out: int) -> Tensor:
    """Make the weight `name`, (fan_in, fan_out) in float64, of variance about ``1 / fan_in``.

    Drawn as integers and scaled by a power of two, so that it is the same on every machine.
    """
    generator = torch.Generator().manual_seed(config.seed * 2**32 + zlib.crc32(name.encode()))
    reach = round((3 / fan_in) ** 0.5 * 2**ACTIVATION_BITS)
    drawn = torch.randint(-reach, reach + 1, (fan_in, fan_out), generator=generator)
    return drawn.double() / 2.0**ACTIVATION_BITS


def embedding(config: ModelConfig, name: str, rows: int) -> Tensor:
    """Make the embedding table `name`, (rows, width) in float64, of variance about one."""
    generator = torch.Generator().manual_seed(config.seed * 2**32 + zlib.crc32(name.encode()))
    drawn = torch.randint(-7094, 7095, (rows, config.width), generator=generator)  # sqrt(3) * 2**12
    return drawn.double() / 2.0**ACTIVATION_BITS

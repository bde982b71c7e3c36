"""E: an image to embeddings (patches -> bidirectional transformer)."""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from omni_connector_serve.reference.exact import rms_norm, snap
from omni_connector_serve.reference.transformer import Alone, Layer
from omni_connector_serve.reference.weights import ModelConfig, embedding, weight

MAX_PIXELS = 64_000_000


def read_image(data: bytes, size: int) -> Tensor:
    """Decode an image file and scale it to `size` x `size`.

    Returns
    -------
    (3, size, size) in uint8

    Raises
    ------
    ValueError
        If `data` is no image that Pillow can read, or a larger one than `MAX_PIXELS`.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(
                    f"the image has {image.width} x {image.height} pixels; at most {MAX_PIXELS:,} are read"
                )
            scaled = image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError, SyntaxError) as error:
        raise ValueError(f"the image cannot be read: {error}") from error
    return torch.from_numpy(np.array(scaled)).permute(2, 0, 1)


class Encoder:
    """The image encoder."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._patch = weight(config, "encoder.patch", 3 * config.patch_size**2, config.width)
        self._position = embedding(config, "encoder.position", config.patches)
        self._layers = [Layer(config, f"encoder.{i}", Alone()) for i in range(config.encoder_layers)]

    def encode(self, pixels: Tensor) -> Tensor:
        """Encode `pixels` (3, image_size, image_size) uint8 to (patches, width) float32."""
        size = self._config.patch_size
        grid = pixels.double().div(128).sub(1).unfold(1, size, size).unfold(2, size, size)
        patches = grid.permute(1, 2, 0, 3, 4).reshape(self._config.patches, -1)
        x = snap(snap(patches @ self._patch) + self._position)
        for layer in self._layers:
            x = layer.forward(x, layer.keys_values(x))
        return rms_norm(x).float()

"""P and D: a decoder-only transformer over image and text, which prefills a paged cache or continues from one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from omni_connector_serve.reference.exact import rms_norm, snap
from omni_connector_serve.reference.paged import PagedKV
from omni_connector_serve.reference.transformer import Alone, Group, Layer
from omni_connector_serve.reference.weights import ModelConfig, embedding, weight


class Decoder:
    """The language model; `group` says which heads this process holds.

    Attributes
    ----------
    computed : int
        Positions that went through the transformer so far: how a test sees that a prompt was not computed twice.
    """

    def __init__(self, config: ModelConfig, group: Group | None = None) -> None:
        group = group or Alone()
        self.config = config
        self.computed = 0
        self.kv_heads = config.kv_heads // group.size
        self._tokens = embedding(config, "decoder.tokens", config.text_tokens + config.audio_tokens)
        self._position = embedding(config, "decoder.position", config.max_positions)
        self._layers = [Layer(config, f"decoder.{i}", group) for i in range(config.decoder_layers)]
        self._unembed = weight(config, "decoder.unembed", config.width, config.audio_tokens)

    def pool(self, num_blocks: int) -> PagedKV:
        """Make a pool of `num_blocks` blocks for this rank's heads."""
        config = self.config
        return PagedKV(config.decoder_layers, num_blocks, config.block_size, self.kv_heads, config.head_size)

    def prompt(self, image: Tensor, text: str) -> Tensor:
        """Join the image's embeddings and the text's bytes to the prompt: (patches + bytes, width) float64."""
        ids = torch.tensor(list(text.encode()), dtype=torch.long)
        return torch.cat((image.double(), self._tokens[ids]))

    def embed(self, token: int) -> Tensor:
        """Embed one audio token: (1, width) float64."""
        return self._tokens[self.config.text_tokens + token].unsqueeze(0)

    def forward(
        self,
        x: Tensor,
        cache: PagedKV,
        blocks: Sequence[int],
        start: int,
        layer_done: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Run positions ``start .. start + len(x)`` through the model, adding them to the cache.

        Parameters
        ----------
        x : (tokens, width) float64
            What stands at these positions.
        cache, blocks
            Where the keys and values of earlier positions are, and those of `x` go.
        start : int
            Position of ``x[0]``; everything before it must be in the cache.
        layer_done : callable, optional
            Called with each layer's index once its part of the cache is complete.

        Returns
        -------
        (width,) float32
            The last position's hidden state.
        """
        tokens = len(x)
        end = start + tokens
        mask = torch.arange(end) <= torch.arange(start, end).unsqueeze(1)
        x = snap(x + self._position[start:end])
        for index, layer in enumerate(self._layers):
            cache.write(index, blocks, start, layer.keys_values(x))
            if layer_done is not None:
                layer_done(index)
            x = layer.forward(x, cache.read(index, blocks, end), mask)
        self.computed += tokens
        return rms_norm(x[-1:])[0].float()

    def sample(self, hidden: Tensor, generator: torch.Generator) -> int:
        """Choose the audio token that follows `hidden` (width,): the likeliest after some seeded noise."""
        logits = hidden.double() @ self._unembed
        noise = torch.randint(0, 2**12, logits.shape, generator=generator).double() / 2.0**10
        return int(torch.argmax(logits + noise))

"""The whole pipeline in one process, the obvious way: what every distributed run is compared with.

Nothing is cached here: each token runs the entire sequence through the model again, so that this is an oracle for the paged
cache, too, and not the same code in one place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from omni_connector_serve.reference.decoder import Decoder
from omni_connector_serve.reference.encoder import Encoder, read_image
from omni_connector_serve.reference.synthesiser import Synthesiser, png
from omni_connector_serve.reference.weights import ModelConfig
from omni_connector_serve.runtime.media import wav


@dataclass(frozen=True)
class Generated:
    """What a request gave.

    Attributes
    ----------
    tokens : list of int
    samples : (len(tokens) * frame_samples,) int16
    picture : (side, side, 3) uint8
    """

    tokens: list[int]
    samples: Tensor
    picture: Tensor

    def as_outputs(self) -> tuple[list[int], bytes, bytes]:
        """Return tokens, WAV and PNG, the files as a server makes them."""
        return self.tokens, wav(self.samples.numpy().tobytes(), ModelConfig.sample_rate_hz), png(self.picture)


def generate(
    image: bytes | None, text: str, *, max_tokens: int = 48, seed: int = 0, config: ModelConfig | None = None
) -> Generated:
    """Answer one request in this process, and compute the prompt anew for every token."""
    config = config or ModelConfig()
    encoder, decoder, synthesiser = Encoder(config), Decoder(config), Synthesiser(config)
    embeddings = torch.zeros(0, config.width)
    if image is not None:
        embeddings = encoder.encode(read_image(image, config.image_size))
    sequence = decoder.prompt(embeddings, text)
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    states: list[Tensor] = []
    for _ in range(max_tokens):
        pool = decoder.pool(-(-len(sequence) // config.block_size))
        with pool.blocks(len(sequence)) as blocks:
            hidden = decoder.forward(sequence, pool, blocks, 0)
        states.append(hidden)
        tokens.append(decoder.sample(hidden, generator))
        sequence = torch.cat((sequence, decoder.embed(tokens[-1])))
    hidden_states = torch.stack(states)
    return Generated(tokens, synthesiser.voice().speak(hidden_states), synthesiser.picture(hidden_states))

"""G: hidden states of audio tokens to a waveform, chunk by chunk, and to a picture."""

from __future__ import annotations

import io
import math

import torch
from PIL import Image
from torch import Tensor

from omni_connector_serve.reference.exact import snap
from omni_connector_serve.reference.weights import ModelConfig, weight

_TABLE_BITS = 12
_PHASE_BITS = 32


class Synthesiser:
    """A bank of wavetable oscillators driven by the hidden states, and a painter of one tile a token."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        bank = config.oscillators
        turn = torch.tensor(
            [math.sin(2 * math.pi * i / 2**_TABLE_BITS) for i in range(2**_TABLE_BITS)], dtype=torch.float64
        )
        self._table = snap(turn)
        self._pitch = weight(config, "synthesiser.pitch", config.width, bank)
        self._loudness = weight(config, "synthesiser.loudness", config.width, bank)
        self._ramp = torch.arange(1, config.frame_samples + 1, dtype=torch.float64) / config.frame_samples
        self._colour = weight(config, "synthesiser.colour", config.width, 3 * 3)
        slope = torch.arange(config.tile_size, dtype=torch.float64) / config.tile_size - 0.5
        down, across = torch.meshgrid(slope, slope, indexing="ij")
        self._basis = torch.stack((torch.ones_like(down), down, across)).flatten(1)

    def voice(self) -> Voice:
        """Start a waveform."""
        return Voice(self)

    def frames(self, hidden: Tensor, phase: Tensor, amplitude: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make one frame a token.

        Parameters
        ----------
        hidden : (tokens, width) float32
        phase : (oscillators,) int64
            Where each oscillator stands, in 2**-32 turns.
        amplitude : (oscillators,) float64
            How loud each one was at the end of the frame before.

        Returns
        -------
        samples : (tokens * frame_samples,) int16
        phase, amplitude
            The state after them.
        """
        config = self.config
        x = hidden.double()
        hertz = 110 + 55 * torch.round(4 + 4 * snap(x @ self._pitch)).clamp(0, 16)
        step = torch.round(hertz / config.sample_rate_hz * 2**_PHASE_BITS).long()
        louder = snap((x @ self._loudness).clamp(0, 2) / (2 * config.oscillators))
        softer = torch.cat((amplitude.unsqueeze(0), louder[:-1]))
        steps = step.repeat_interleave(config.frame_samples, dim=0)
        phases = (phase + steps.cumsum(0)) % 2**_PHASE_BITS
        gain = softer.unsqueeze(1) + (louder - softer).unsqueeze(1) * self._ramp.view(1, -1, 1)
        turns = self._table[phases >> (_PHASE_BITS - _TABLE_BITS)]
        mixed = snap(turns * gain.flatten(0, 1), bits=20).sum(-1)
        return torch.round(mixed.clamp(-1, 1) * 32767).to(torch.int16), phases[-1], louder[-1]

    def picture(self, hidden: Tensor) -> Tensor:
        """Paint all tokens' `hidden` (tokens, width) as tiles of a square: (side, side, 3) uint8."""
        tile = self.config.tile_size
        side = math.ceil(math.sqrt(len(hidden)))
        slopes = snap(hidden.double() @ self._colour).view(-1, 3, 3)
        tiles = torch.round(128 + 64 * (slopes @ self._basis)).clamp(0, 255).to(torch.uint8)
        square = torch.zeros(side * side, 3, tile * tile, dtype=torch.uint8)
        square[: len(hidden)] = tiles
        return square.view(side, side, 3, tile, tile).permute(0, 3, 1, 4, 2).reshape(side * tile, side * tile, 3)


class Voice:
    """One waveform in the making."""

    def __init__(self, synthesiser: Synthesiser) -> None:
        bank = synthesiser.config.oscillators
        self._synthesiser = synthesiser
        self._phase = torch.zeros(bank, dtype=torch.long)
        self._amplitude = torch.zeros(bank, dtype=torch.float64)

    def speak(self, hidden: Tensor) -> Tensor:
        """Continue the waveform by the tokens of `hidden` (tokens, width): (tokens * frame_samples,) int16."""
        samples, self._phase, self._amplitude = self._synthesiser.frames(hidden, self._phase, self._amplitude)
        return samples


def png(picture: Tensor) -> bytes:
    """Encode `picture` (height, width, 3) uint8 as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(picture.numpy()).save(file, "PNG")
    return file.getvalue()

"""The reference model as four stages.

Each stage builds the same weights from the seed in its options, so nothing but the pipeline file has to be shared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from omni_connector_core.kv import KVReceiver, KVSender, KVSpec
from omni_connector_serve.reference.decoder import Decoder
from omni_connector_serve.reference.encoder import Encoder, read_image
from omni_connector_serve.reference.paged import OutOfBlocksError, PagedKV
from omni_connector_serve.reference.ranks import join
from omni_connector_serve.reference.synthesiser import Synthesiser, png
from omni_connector_serve.reference.weights import ModelConfig
from omni_connector_serve.runtime.stage import REQUEST, RequestError, StageContext, Task

__all__ = ["MAX_TOKENS", "Decode", "Encode", "Generate", "Prefill", "Sampling"]

MAX_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What a client may ask for in ``params``.

    Attributes
    ----------
    max_tokens : int
        How many audio tokens are made.
    seed : int
        Of the noise that chooses among likely tokens.
    """

    max_tokens: int = 48
    seed: int = 0

    @classmethod
    def of(cls, task: Task) -> Sampling:
        """Check the request's ``params``.

        Raises
        ------
        RequestError
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name, value in task.params.items():
            if name not in known:
                raise RequestError(f"params.{name} is unknown; known are {', '.join(known)}")
            if type(value) is not int or not 0 <= value < 2**63:
                raise RequestError(f"params.{name} is an integer from 0 to 2**63 - 1, not {value!r}")
        sampling = cls(**task.params)
        if not 1 <= sampling.max_tokens <= MAX_TOKENS:
            raise RequestError(f"params.max_tokens is from 1 to {MAX_TOKENS}, not {sampling.max_tokens}")
        return sampling


class Encode:
    """E: the image of the request to embeddings; none without an image."""

    def setup(self, context: StageContext) -> None:
        """Build the encoder."""
        self._config = _configure(context)
        self._encoder = Encoder(self._config)

    def process(self, task: Task) -> Any:
        """Return the image's embeddings: (patches, width) float32."""
        media = task.input(REQUEST)["media"]
        for name in media:
            if name != "image":
                raise RequestError(f"media.{name} is unknown; known is image")
        if not media:
            return {"embeddings": torch.zeros(0, self._config.width)}
        try:
            pixels = read_image(bytes(media["image"]), self._config.image_size)
        except ValueError as error:
            raise RequestError(str(error)) from error
        return {"embeddings": self._encoder.encode(pixels)}


class Prefill:
    """P: image and text through the transformer, once; what it sends is the KV cache, each layer when it is computed.

    With several ranks each one holds, and sends, its own heads.
    """

    def setup(self, context: StageContext) -> None:
        """Build this rank's part of the decoder and its pool of KV blocks."""
        config = _configure(context)
        self._decoder = Decoder(config, join(context))
        self._pool = self._decoder.pool(context.options.get("num_blocks", 256))
        [consumer] = context.producers
        spec = kv_spec(config, tp_size=context.size, tp_rank=context.rank)
        theirs = kv_spec(config, tp_size=context.ranks[consumer])
        self._sender = KVSender(context.producers[consumer], spec, theirs, self._pool.layers)

    def process(self, task: Task) -> Iterator[Any]:
        """Yield the number of positions, so that the cache's consumer can begin, and at the end the last hidden state."""
        sampling = Sampling.of(task)
        decoder = self._decoder
        prompt = decoder.prompt(task.input(_producer(task))["embeddings"], task.input(REQUEST)["text"])
        positions = len(prompt)
        room = decoder.config.max_positions - sampling.max_tokens
        if not 0 < positions <= room:
            raise RequestError(f"text and image make {positions} positions; from 1 to {room} are possible")
        with _blocks(self._pool, positions) as blocks, self._sender.open(task.request_id, blocks, positions) as send:
            yield {"positions": positions}
            hidden = decoder.forward(prompt, self._pool, blocks, 0, layer_done=send.send_layer)
        yield {"hidden": hidden}


class Decode:
    """D: token by token from the cache that P made, received straight into blocks of its own."""

    def setup(self, context: StageContext) -> None:
        """Build the decoder and its pool of KV blocks."""
        config = _configure(context)
        self._decoder = Decoder(config)
        self._pool = self._decoder.pool(context.options.get("num_blocks", 256))
        self._chunk_tokens = context.options.get("chunk_tokens", 8)
        [producer] = context.consumers
        theirs = kv_spec(config, tp_size=context.ranks[producer])
        self._receiver = KVReceiver(context.consumers[producer], kv_spec(config), theirs, self._pool.layers)

    def process(self, task: Task) -> Iterator[Any]:
        """Yield tokens and their hidden states (tokens, width), a chunk at a time."""
        sampling = Sampling.of(task)
        decoder, pool = self._decoder, self._pool
        [(producer, replica)] = task.producers.items()
        prefilled = task.stream(producer)
        positions = next(prefilled)["positions"]
        generator = torch.Generator().manual_seed(sampling.seed)
        computed_before = decoder.computed
        with _blocks(pool, positions + sampling.max_tokens) as blocks:
            filled = blocks[: -(-positions // pool.block_size)]
            with self._receiver.open(task.request_id, filled, positions, replica=replica) as receive:
                receive.all()
            [hidden] = [part["hidden"] for part in prefilled]
            tokens: list[int] = []
            states: list[torch.Tensor] = []
            for count in range(sampling.max_tokens):
                if count:
                    hidden = decoder.forward(decoder.embed(tokens[-1]), pool, blocks, positions + count - 1)
                states.append(hidden)
                tokens.append(decoder.sample(hidden, generator))
                if len(states) == self._chunk_tokens:
                    yield {"tokens": tokens[-len(states) :], "hidden": torch.stack(states)}
                    states.clear()
        computed = decoder.computed - computed_before
        if computed != sampling.max_tokens - 1:
            raise RuntimeError(
                f"decode computed {computed} positions for {sampling.max_tokens} tokens: the prompt again?"
            )
        yield {
            "tokens": tokens[len(tokens) - len(states) :],
            "hidden": torch.stack(states) if states else torch.zeros(0, decoder.config.width),
            "usage": {"prompt_positions": positions, "decode_positions": computed},
        }


class Generate:
    """G: tokens to sound as they come, and to a picture at the end."""

    def setup(self, context: StageContext) -> None:
        """Build the synthesiser."""
        self._synthesiser = Synthesiser(_configure(context))

    def process(self, task: Task) -> Iterator[Any]:
        """Yield sound chunk by chunk, then the picture, the tokens and what was computed."""
        voice = self._synthesiser.voice()
        tokens: list[int] = []
        states = []
        usage: dict[str, int] = {}
        for chunk in task.stream(_producer(task)):
            tokens += chunk["tokens"]
            usage = chunk.get("usage", usage)
            if chunk["tokens"]:
                states.append(chunk["hidden"].clone())
                samples = voice.speak(states[-1])
                rate_hz = self._synthesiser.config.sample_rate_hz
                yield {"audio": {"media_type": "audio/pcm", "rate_hz": rate_hz, "data": samples.numpy().tobytes()}}
        picture = png(self._synthesiser.picture(torch.cat(states)))
        yield {"image": {"media_type": "image/png", "data": picture}, "tokens": tokens, "usage": usage}


def kv_spec(config: ModelConfig, *, tp_size: int = 1, tp_rank: int | None = None) -> KVSpec:
    """Describe the decoder's cache, of one rank or of a side."""
    return KVSpec(
        num_layers=config.decoder_layers,
        num_kv_heads=config.kv_heads,
        head_size=config.head_size,
        block_size=config.block_size,
        dtype="float32",
        tp_size=tp_size,
        tp_rank=tp_rank,
    )


def _configure(context: StageContext) -> ModelConfig:
    # Several processes share the machine, and each one's matrices are small.
    torch.set_num_threads(1)
    return ModelConfig(**context.options.get("model", {}))


def _producer(task: Task) -> str:
    """Name the one stage before this one, however the pipeline calls it."""
    [name] = [name for name in task.producers if name != REQUEST]
    return name


def _blocks(pool: PagedKV, tokens: int) -> AbstractContextManager[list[int]]:
    try:
        return pool.blocks(tokens)
    except OutOfBlocksError as error:
        raise RequestError(str(error)) from error

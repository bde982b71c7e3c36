"""The reference model: however its work is cut, the bits are the same."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from omni_connector_serve.reference.decoder import Decoder
from omni_connector_serve.reference.encoder import Encoder, read_image
from omni_connector_serve.reference.exact import LIMIT, attention, snap
from omni_connector_serve.reference.paged import OutOfBlocksError
from omni_connector_serve.reference.single import generate
from omni_connector_serve.reference.synthesiser import Synthesiser
from omni_connector_serve.reference.weights import ModelConfig

torch.set_num_threads(1)  # the matrices are small, and threads only wait for each other

CONFIG = ModelConfig()
TEXT = "the sea, please"
TOKENS = 24


def picture(kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(7).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="module")
def whole() -> tuple[list[int], Tensor]:
    """Tokens and samples of one process that caches nothing."""
    generated = generate(picture(), TEXT, max_tokens=TOKENS)
    return generated.tokens, generated.samples


def decode(decoder: Decoder, prompt: Tensor, count: int, chunk: int = 1) -> tuple[list[int], Tensor]:
    """Prefill in pieces of `chunk` positions, then go on token by token from the cache."""
    generator = torch.Generator().manual_seed(0)
    pool = decoder.pool(64)
    tokens: list[int] = []
    states = []
    with pool.blocks(len(prompt) + count) as blocks:
        for start in range(0, len(prompt), chunk):
            hidden = decoder.forward(prompt[start : start + chunk], pool, blocks, start)
        for position in range(len(prompt), len(prompt) + count):
            states.append(hidden)
            tokens.append(decoder.sample(hidden, generator))
            hidden = decoder.forward(decoder.embed(tokens[-1]), pool, blocks, position)
    assert pool.free_blocks == 64
    return tokens, torch.stack(states)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_paged_cache_gives_what_computing_everything_anew_gives(
    whole: tuple[list[int], Tensor], chunk: int
) -> None:
    decoder = Decoder(CONFIG)
    image = Encoder(CONFIG).encode(read_image(picture(), CONFIG.image_size))
    tokens, states = decode(decoder, decoder.prompt(image, TEXT), TOKENS, chunk)
    assert tokens == whole[0]
    assert Synthesiser(CONFIG).voice().speak(states).equal(whole[1])


class Ranks:
    """A group of threads."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Tensor]) -> None:
        self.rank, self.size, self._barrier, self._board = rank, size, barrier, board

    def all_reduce(self, x: Tensor) -> Tensor:
        self._board[self.rank] = x
        self._barrier.wait()
        total = torch.stack(self._board[:: -1 if self.rank else 1]).sum(0)  # each rank adds in another order
        self._barrier.wait()
        return total


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_ranks_give_the_bits_of_one_process(size: int) -> None:
    board = [torch.empty(0)] * size
    barrier = threading.Barrier(size)
    caches: list[list[Tensor]] = [[] for _ in range(size)]
    hidden: list[Tensor] = [torch.empty(0)] * size

    def run(rank: int) -> None:
        decoder = Decoder(CONFIG, Ranks(rank, size, barrier, board))
        pool = decoder.pool(4)
        with pool.blocks(40) as blocks:
            hidden[rank] = decoder.forward(decoder.prompt(torch.zeros(0, CONFIG.width), "x" * 40), pool, blocks, 0)
            caches[rank] = [pool.read(layer, blocks, 40) for layer in range(CONFIG.decoder_layers)]

    together(size, run)
    alone = Decoder(CONFIG)
    pool = alone.pool(4)
    with pool.blocks(40) as blocks:
        expected = alone.forward(alone.prompt(torch.zeros(0, CONFIG.width), "x" * 40), pool, blocks, 0)
        for layer in range(CONFIG.decoder_layers):
            assert torch.cat([cache[layer] for cache in caches], dim=2).equal(pool.read(layer, blocks, 40))
    assert all(state.equal(expected) for state in hidden)


def together(size: int, run: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@given(cuts=st.lists(st.integers(1, 20), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
def test_sound_does_not_depend_on_how_tokens_are_cut_into_chunks(cuts: list[int]) -> None:
    synthesiser = Synthesiser(CONFIG)
    states = torch.randn(sum(cuts), CONFIG.width, generator=torch.Generator().manual_seed(1))
    voice = synthesiser.voice()
    chunks = [voice.speak(part) for part in states.split(cuts)]
    assert torch.cat(chunks).equal(synthesiser.voice().speak(states))


def test_sums_do_not_depend_on_their_order() -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (snap(torch.randn(50, 4, 16, generator=generator).double() * 40) for _ in range(3))
    order = torch.randperm(50, generator=generator)
    assert attention(query, key, value).equal(attention(query, key[order], value[order]))


def test_activations_fit_the_float32_in_which_they_travel() -> None:
    extreme = snap(torch.tensor([1e9, -1e9, 1 / 3, LIMIT]).double())
    assert extreme.float().double().equal(extreme)
    assert extreme.abs().max() == LIMIT


def test_seed_text_and_image_each_change_the_tokens(whole: tuple[list[int], Tensor]) -> None:
    others = [
        generate(picture(), TEXT, max_tokens=4, seed=1).tokens,
        generate(picture(), "something else", max_tokens=4).tokens,
        generate(None, TEXT, max_tokens=4).tokens,
    ]
    assert whole[0][:4] not in others


def test_an_image_is_read_whatever_its_format_and_size() -> None:
    assert read_image(picture("BMP"), 32).shape == (3, 32, 32)


@pytest.mark.parametrize("data", [b"", b"no image", picture()[:200]])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="the image cannot be read"):
        read_image(data, 32)


def test_a_huge_image_is_refused_before_it_is_decoded() -> None:
    file = io.BytesIO()
    Image.new("1", (20_000, 4_000)).save(file, "PNG")
    with pytest.raises(ValueError, match="20000 x 4000 pixels"):
        read_image(file.getvalue(), 32)


def test_blocks_are_held_and_given_back() -> None:
    pool = Decoder(CONFIG).pool(3)
    with pool.blocks(40) as blocks:
        assert len(blocks) == 3
        with pytest.raises(OutOfBlocksError, match="1 KV blocks are needed and 0 of them are free"):
            pool.blocks(1)
    with pytest.raises(ZeroDivisionError), pool.blocks(17):
        assert pool.free_blocks == 1
        raise ZeroDivisionError
    assert pool.free_blocks == 3

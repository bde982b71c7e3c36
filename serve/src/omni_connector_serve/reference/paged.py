"""A KV cache as serving engines hold it: a pool of fixed blocks for each layer, and a list of block ids per request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor


class OutOfBlocksError(RuntimeError):
    """The pool has fewer free blocks than the request needs."""


class PagedKV:
    """The pool of one rank.

    Attributes
    ----------
    layers : list of (2, num_blocks, block_size, kv_heads, head_size) float32
        Keys and values; a token at position ``p`` is in slot ``p % block_size`` of its request's block ``p // block_size``.
    """

    def __init__(self, layers: int, num_blocks: int, block_size: int, kv_heads: int, head_size: int) -> None:
        self.block_size = block_size
        self.layers = [torch.zeros(2, num_blocks, block_size, kv_heads, head_size) for _ in range(layers)]
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no request holds."""
        return len(self._free)

    def blocks(self, tokens: int) -> AbstractContextManager[list[int]]:
        """Hold the blocks for `tokens` tokens, their ids in order, for the length of a ``with``.

        Raises
        ------
        OutOfBlocksError
        """
        needed = -(-tokens // self.block_size)
        if needed > len(self._free):
            raise OutOfBlocksError(f"{needed} KV blocks are needed and {len(self._free)} of them are free")
        return self._hold(needed)

    @contextmanager
    def _hold(self, count: int) -> Iterator[list[int]]:
        held = [self._free.pop() for _ in range(count)]
        try:
            yield held
        finally:
            self._free.extend(reversed(held))

    def write(self, layer: int, blocks: Sequence[int], start: int, pair: Tensor) -> None:
        """Store `pair` (2, tokens, kv_heads, head_size) for the positions from `start` on."""
        positions = torch.arange(start, start + pair.shape[1])
        ids = torch.tensor(blocks)[positions // self.block_size]
        self.layers[layer][:, ids, positions % self.block_size] = pair.float()

    def read(self, layer: int, blocks: Sequence[int], tokens: int) -> Tensor:
        """Load the first `tokens` positions, as (2, tokens, kv_heads, head_size) float64."""
        return self.layers[layer][:, torch.tensor(blocks)].flatten(1, 2)[:, :tokens].double()

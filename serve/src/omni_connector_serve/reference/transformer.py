"""One transformer layer, whole or as a tensor-parallel rank's share of it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from omni_connector_serve.reference.exact import attention, rms_norm, snap
from omni_connector_serve.reference.weights import ModelConfig, weight


class Group(Protocol):
    """The ranks that hold one layer between them."""

    @property
    def rank(self) -> int:
        """Place of this process among them."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks."""
        ...


class Alone:
    """The group of a process that holds whole layers."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x


class Layer:
    """Pre-norm attention and feed-forward; heads and hidden units are divided evenly among the group's ranks."""

    def __init__(self, config: ModelConfig, name: str, group: Group) -> None:
        if config.kv_heads % group.size:
            raise ValueError(f"{config.kv_heads} KV heads cannot be divided among {group.size} ranks")
        self._group = group
        self._head_size = config.head_size
        width, hidden = config.width, 4 * config.width

        def columns(part: str, fan_out: int) -> Tensor:
            return weight(config, f"{name}.{part}", width, fan_out).chunk(group.size, dim=1)[group.rank].contiguous()

        def rows(part: str, fan_in: int) -> Tensor:
            return weight(config, f"{name}.{part}", fan_in, width).chunk(group.size, dim=0)[group.rank].contiguous()

        self._query = columns("query", config.heads * config.head_size)
        self._key = columns("key", config.kv_heads * config.head_size)
        self._value = columns("value", config.kv_heads * config.head_size)
        self._out = rows("out", config.heads * config.head_size)
        self._up = columns("up", hidden)
        self._down = rows("down", hidden)

    def keys_values(self, x: Tensor) -> Tensor:
        """Project `x` (tokens, width) to this rank's keys and values: (2, tokens, kv_heads / ranks, head_size)."""
        y = rms_norm(x)
        pair = torch.stack((snap(y @ self._key), snap(y @ self._value)))
        return pair.view(2, len(x), -1, self._head_size)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run the layer on `x` (tokens, width) with `context`, what `keys_values` made of all tokens looked at."""
        query = snap(rms_norm(x) @ self._query).view(len(x), -1, self._head_size)
        mixed = attention(query, context[0], context[1], mask)
        x = snap(x + self._group.all_reduce(mixed @ self._out))
        hidden = snap(torch.relu(rms_norm(x) @ self._up))
        return snap(x + self._group.all_reduce(hidden @ self._down))

"""What one side of a KV-cache flow holds: the model's cache, and which part of it which rank has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from omni_connector_core.errors import IncompatibleKVError

__all__ = ["KVSpec", "Rank", "Span", "check_compatible"]

LAYOUTS = {
    "kv_first": 2,
    "block_first": 2,
    "heads_first": 2,
    "separate": 2,
    "latent": 1,
}
"""Layout of one layer's cache, with its number of planes: K and V, or MLA's single latent.

kv_first     ``[2, blocks, block_size, heads, head_size]``
block_first  ``[blocks, 2, block_size, heads, head_size]``
heads_first  ``[2, blocks, heads, block_size, head_size]``
separate     a pair of ``[blocks, block_size, heads, head_size]``
latent       ``[blocks, block_size, head_size]``; every tp rank holds all of it
"""

ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}


class Span(NamedTuple):
    """A half-open range of heads, layers or tokens."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __and__(self, other: Span) -> Span:
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))


class Rank(NamedTuple):
    """A rank's coordinates in its side's group."""

    tp: int
    pp: int
    sp: int

    def __str__(self) -> str:
        return f"tp{self.tp}.pp{self.pp}.sp{self.sp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """One side of a KV-cache flow, as one of its ranks sees it.

    Attributes
    ----------
    num_layers, num_kv_heads, head_size
        Of the whole model, not of a rank. For the layout ``latent`` there is one head, and `head_size` is the latent's.
    block_size
        Tokens per block; the sides may differ.
    dtype
        One of float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, uint8.
    layout
        Of one layer's cache (see `LAYOUTS`); the sides may differ.
    tp_size, tp_rank
        Heads are split over the tensor-parallel ranks; with more ranks than heads each head is replicated.
    pp_ranges, pp_rank
        Layers ``[start, stop)`` of each pipeline-parallel rank; empty: one rank with all layers.
    sp_size, sp_rank
        Tokens are split over the sequence-parallel ranks, in contiguous, balanced ranges.

    Raises
    ------
    IncompatibleKVError
        A field makes no sense; in particular a rank that is not given while its size is above one.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: str
    layout: str = "kv_first"
    tp_size: int = 1
    tp_rank: int | None = None
    pp_ranges: tuple[Span, ...] = ()
    pp_rank: int | None = None
    sp_size: int = 1
    sp_rank: int | None = None

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_size", "block_size", "tp_size", "sp_size"):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise IncompatibleKVError(f"{field} is a positive int, not {value!r}", field=field)
        for field, known in (("dtype", ITEMSIZES), ("layout", LAYOUTS)):
            if getattr(self, field) not in known:
                raise IncompatibleKVError(f"{field} is one of {', '.join(known)}", field=field)
        if self.layout == "latent" and self.num_kv_heads != 1:
            raise IncompatibleKVError("a latent cache has one head", field="num_kv_heads")
        small, large = sorted((self.num_kv_heads, self.tp_size))
        if large % small:
            raise IncompatibleKVError(
                f"{self.num_kv_heads} KV heads cannot be spread evenly over {self.tp_size} ranks", field="tp_size"
            )
        ranges = tuple(Span(*span) for span in self.pp_ranges) or (Span(0, self.num_layers),)
        covered = sorted(layer for span in ranges for layer in range(*span))
        if covered != list(range(self.num_layers)):
            raise IncompatibleKVError(f"the pp ranges do not cover {self.num_layers} layers once", field="pp_ranges")
        object.__setattr__(self, "pp_ranges", ranges)
        for field, size in (("tp_rank", self.tp_size), ("pp_rank", len(ranges)), ("sp_rank", self.sp_size)):
            rank = getattr(self, field)
            if rank is None and size == 1:
                object.__setattr__(self, field, 0)
            elif rank is not None and not 0 <= rank < size:
                raise IncompatibleKVError(f"{field} {rank} of {size}", field=field)

    @property
    def planes(self) -> int:
        """How many arrays a layer has: 2 for K and V, 1 for a latent."""
        return LAYOUTS[self.layout]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZES[self.dtype]

    @property
    def rank(self) -> Rank:
        """Coordinates of this rank.

        Raises
        ------
        IncompatibleKVError
            One of them was not given.
        """
        for field in ("tp_rank", "pp_rank", "sp_rank"):
            if getattr(self, field) is None:
                size = {"tp_rank": self.tp_size, "pp_rank": len(self.pp_ranges), "sp_rank": self.sp_size}[field]
                raise IncompatibleKVError(f"{field} was not given, of {size} ranks", field=field)
        return Rank(self.tp_rank or 0, self.pp_rank or 0, self.sp_rank or 0)

    def ranks(self) -> Iterator[Rank]:
        """Iterate over all ranks of the side."""
        spaces = (range(self.tp_size), range(len(self.pp_ranges)), range(self.sp_size))
        return (Rank(*rank) for rank in itertools.product(*spaces))

    def number_of(self, rank: Rank) -> int:
        """Return the number of a rank of this side, counted with tp fastest."""
        return (rank.pp * self.sp_size + rank.sp) * self.tp_size + rank.tp

    def group(self) -> KVSpec:
        """Return the same side with no rank in it, equal for all of its ranks."""
        return replace(self, tp_rank=None, pp_rank=None, sp_rank=None)

    def heads_of(self, tp_rank: int) -> Span:
        """Heads that a tensor-parallel rank holds."""
        if self.tp_size <= self.num_kv_heads:
            each = self.num_kv_heads // self.tp_size
            return Span(tp_rank * each, (tp_rank + 1) * each)
        head = tp_rank // (self.tp_size // self.num_kv_heads)
        return Span(head, head + 1)

    def tokens_of(self, sp_rank: int, num_tokens: int) -> Span:
        """Tokens that a sequence-parallel rank holds of a request's `num_tokens`; its reuse length is their number."""
        each, more = divmod(num_tokens, self.sp_size)
        start = sp_rank * each + min(sp_rank, more)
        return Span(start, start + each + (sp_rank < more))


def check_compatible(producer: KVSpec, consumer: KVSpec) -> None:
    """Raise unless the producer's cache can become the consumer's; block size, layout and parallelism may differ.

    Raises
    ------
    IncompatibleKVError
        Names the first field that cannot be bridged.
    """
    for field in ("num_layers", "num_kv_heads", "head_size", "dtype", "planes"):
        theirs, ours = getattr(producer, field), getattr(consumer, field)
        if theirs != ours:
            raise IncompatibleKVError(
                f"{field} differs: {theirs} at the producer, {ours} at the consumer",
                field=field,
                hint="Both stages must run the same model with the same cache dtype",
            )

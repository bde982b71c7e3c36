"""Who sends which part of a layer to whom: pure, and the same on both sides.

The heads of the model and the tokens of the request are cut wherever either side cuts them. What is left are tiles, each held whole
by one or more producer ranks and needed whole by one or more consumer ranks. One producer sends it, once; all of its consumers read
the same payload.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from omni_connector_core.key import Key
from omni_connector_core.kv.spec import KVSpec, Rank, Span, check_compatible

__all__ = ["Plan", "Tile", "head_key", "plan", "tile_key"]


class Tile(NamedTuple):
    """A part of every layer: some heads of some tokens.

    Attributes
    ----------
    heads, tokens
        Of the whole model, of the whole request.
    source
        tp and sp rank of the producer that sends it.
    targets
        tp and sp ranks of the consumers that need it.
    """

    heads: Span
    tokens: Span
    source: tuple[int, int]
    targets: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The way of one request's cache from one side to the other.

    Attributes
    ----------
    producer, consumer
        The two sides, without ranks.
    tiles
        The same for every layer.
    """

    producer: KVSpec
    consumer: KVSpec
    num_tokens: int
    tiles: tuple[Tile, ...]

    def sent_by(self, rank: Rank) -> list[Tile]:
        """List the tiles that a producer rank sends, for each of its layers."""
        return [tile for tile in self.tiles if tile.source == (rank.tp, rank.sp)]

    def needed_by(self, rank: Rank) -> list[Tile]:
        """List the tiles that a consumer rank needs, for each of its layers."""
        return [tile for tile in self.tiles if (rank.tp, rank.sp) in tile.targets]

    def producers_for(self, rank: Rank) -> list[Rank]:
        """List the producer ranks that a consumer rank hears from."""
        pps = _sharing(self.consumer.pp_ranges[rank.pp], self.producer.pp_ranges)
        sources = dict.fromkeys(tile.source for tile in self.needed_by(rank))
        return [Rank(tp, pp, sp) for pp in pps for tp, sp in sources]

    def consumers_of(self, rank: Rank) -> list[Rank]:
        """List the consumer ranks that hear from a producer rank."""
        pps = _sharing(self.producer.pp_ranges[rank.pp], self.consumer.pp_ranges)
        targets = dict.fromkeys(target for tile in self.sent_by(rank) for target in tile.targets)
        return [Rank(tp, pp, sp) for pp in pps for tp, sp in targets]


def plan(producer: KVSpec, consumer: KVSpec, num_tokens: int) -> Plan:
    """Plan one request's flow.

    Parameters
    ----------
    producer, consumer
        The two sides; their ranks do not matter.
    num_tokens
        Tokens of the request's cache, over all sequence-parallel ranks.

    Raises
    ------
    IncompatibleKVError
        The sides cannot be bridged.
    """
    producer, consumer = producer.group(), consumer.group()
    tokens = _token_tiles(producer, consumer, num_tokens)
    tiles = tuple(
        Tile(heads, span, (tp, source_sp), tuple((target, target_sp) for target in targets))
        for (heads, tp, targets), (span, source_sp, target_sp) in itertools.product(
            _head_tiles(producer, consumer), tokens
        )
    )
    return Plan(producer, consumer, num_tokens, tiles)


@lru_cache(maxsize=256)
def _head_tiles(producer: KVSpec, consumer: KVSpec) -> list[tuple[Span, int, tuple[int, ...]]]:
    """Cut the heads: which, from which producer rank, for which consumer ranks."""
    check_compatible(producer, consumer)
    holders = [producer.heads_of(rank) for rank in range(producer.tp_size)]
    takers = [consumer.heads_of(rank) for rank in range(consumer.tp_size)]
    cuts = sorted({edge for span in holders + takers for edge in span})
    tiles = []
    for number, heads in enumerate(itertools.starmap(Span, itertools.pairwise(cuts))):
        having = [rank for rank, span in enumerate(holders) if span & heads == heads]
        needing = tuple(rank for rank, span in enumerate(takers) if span & heads == heads)
        # replicas of a head take turns, so that no rank sends for all of them
        tiles.append((heads, having[number % len(having)], needing))
    return tiles


def _token_tiles(producer: KVSpec, consumer: KVSpec, num_tokens: int) -> list[tuple[Span, int, int]]:
    """Cut the tokens: which, from which sp rank, to which."""
    return [
        (shared, source, target)
        for source in range(producer.sp_size)
        for target in range(consumer.sp_size)
        if len(shared := producer.tokens_of(source, num_tokens) & consumer.tokens_of(target, num_tokens))
    ]


def _sharing(layers: Span, ranges: tuple[Span, ...]) -> list[int]:
    return [pp for pp, span in enumerate(ranges) if len(span & layers)]


def tile_key(request_id: str, layer: int, tile: Tile) -> Key:
    """Name one layer's part of a tile; both sides derive the same."""
    (h0, h1), (t0, t1) = tile.heads, tile.tokens
    return Key(request_id, layer, f"kv/{h0}-{h1}/{t0}-{t1}")


def head_key(request_id: str, rank: Rank) -> Key:
    """Name what a producer rank says of itself before any bytes move."""
    return Key(request_id, 0, f"kv/head/{rank}")

"""A rank's own paged cache as strided arrays, whatever its layout, and the copies between it and a tile.

A tile on the wire is an array ``[planes, tokens, heads, head_size]`` of raw elements. Copies go block run by block run, each one a
`numpy.copyto` that runs without the GIL; neighbouring block ids make one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from omni_connector_core.errors import ConfigError, IncompatibleKVError
from omni_connector_core.kv.plan import Tile
from omni_connector_core.kv.spec import KVSpec, Span

__all__ = ["Placement", "Run", "place", "planes_by_layer", "planes_of", "runs"]

Raw = np.ndarray[Any, np.dtype[Any]]

RAW: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


def raw_array(cache: Any) -> Raw:
    """See a CPU tensor or array as an array of unsigned ints of the same width, sharing its memory."""
    if isinstance(cache, np.ndarray):
        return cache.view(RAW[cache.dtype.itemsize])
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    array: Raw = cache.detach().view(kinds[cache.element_size()]).numpy()
    return array.view(RAW[array.dtype.itemsize])


def planes_of(spec: KVSpec, layer_cache: Any) -> list[Raw]:
    """See one layer's cache as planes ``[blocks, block_size, heads, head_size]``, sharing its memory.

    Raises
    ------
    IncompatibleKVError
        Its shape or width is not what the spec says of this rank.
    """
    if spec.layout == "separate":
        planes = [raw_array(part) for part in layer_cache]
    else:
        array = raw_array(layer_cache)
        if spec.layout == "kv_first":
            planes = list(array)
        elif spec.layout == "block_first":
            planes = [array[:, plane] for plane in range(array.shape[1])]
        elif spec.layout == "heads_first":
            planes = [plane.swapaxes(1, 2) for plane in array]
        else:
            planes = [array[:, :, None, :]]
    heads = len(spec.heads_of(spec.rank.tp))
    for plane in planes:
        if plane.ndim != 4 or plane.shape[1:] != (spec.block_size, heads, spec.head_size):
            raise IncompatibleKVError(
                f"a layer's cache has blocks of shape {plane.shape[1:]}, the spec says "
                f"{(spec.block_size, heads, spec.head_size)}",
                field="layout",
            )
        if plane.dtype.itemsize != spec.itemsize:
            raise IncompatibleKVError(f"the cache has {plane.dtype.itemsize} bytes per element", field="dtype")
    if len(planes) != spec.planes:
        raise IncompatibleKVError(f"the cache has {len(planes)} planes, the spec says {spec.planes}", field="layout")
    return planes


def planes_by_layer(spec: KVSpec, caches: Sequence[Any]) -> dict[int, list[Raw]]:
    """See the caches of a rank's layers, in order, as planes, by the layer's number in the model.

    Raises
    ------
    ConfigError
        They are more or fewer than the rank has layers.
    IncompatibleKVError
        One is not what the spec says.
    """
    layers = spec.pp_ranges[spec.rank.pp]
    if len(caches) != len(layers):
        raise ConfigError(f"{len(caches)} caches for the {len(layers)} layers of this rank")
    return {layer: planes_of(spec, cache) for layer, cache in zip(range(*layers), caches, strict=True)}


class Run(NamedTuple):
    """Neighbouring tokens in neighbouring blocks.

    Attributes
    ----------
    start, stop
        Tokens, counted from the start of the tile.
    block, offset
        Where the first of them lies. A run is whole blocks, or a part of one block.
    blocks
        How many blocks; 0 for a part of one.
    """

    start: int
    stop: int
    block: int
    offset: int
    blocks: int


def runs(block_ids: Sequence[int], block_size: int, first: int, stop: int) -> Iterator[Run]:
    """Walk over tokens ``[first, stop)`` of a request whose blocks are `block_ids`."""
    token = first
    while token < stop:
        index, offset = divmod(token, block_size)
        block = block_ids[index]
        if offset or stop - token < block_size:
            end = min(stop, token - offset + block_size)
            yield Run(token - first, end - first, block, offset, 0)
            token = end
            continue
        whole = (stop - token) // block_size
        count = 1
        while count < whole and block_ids[index + count] == block + count:
            count += 1
        yield Run(token - first, token - first + count * block_size, block, 0, count)
        token += count * block_size


class Placement:
    """Where one tile of one request lies in this rank's cache.

    Parameters
    ----------
    spec
        This rank's side.
    heads, tokens
        The tile's, of the whole model and request.
    held
        Tokens that this rank holds of the request.
    block_ids
        The request's blocks in this rank's cache, in order of tokens.
    """

    def __init__(self, spec: KVSpec, heads: Span, tokens: Span, held: Span, block_ids: Sequence[int]) -> None:
        own = spec.heads_of(spec.rank.tp)
        self.shape = (spec.planes, len(tokens), len(heads), spec.head_size)
        self.dtype = RAW[spec.itemsize]
        self.nbytes = int(np.prod(self.shape)) * spec.itemsize
        self._heads = slice(heads.start - own.start, heads.stop - own.start)
        self._all_heads = heads == own
        first = tokens.start - held.start
        self._runs = list(runs(block_ids, spec.block_size, first, first + len(tokens)))

    def gather(self, planes: Sequence[Raw], tile: Raw) -> None:
        """Copy from the cache into a tile."""
        for plane, part in zip(planes, tile, strict=True):
            for run in self._runs:
                there, here = self._views(plane, part, run)
                np.copyto(here, there)

    def scatter(self, planes: Sequence[Raw], tile: Raw) -> None:
        """Copy from a tile into the cache."""
        for plane, part in zip(planes, tile, strict=True):
            for run in self._runs:
                there, here = self._views(plane, part, run)
                np.copyto(there, here)

    def pieces(self, planes: Sequence[Raw]) -> list[memoryview] | None:
        """List the cache's memory in the tile's order, or None where that is not made of contiguous runs."""
        if not self._all_heads:
            return None
        found = []
        for plane in planes:
            for run in self._runs:
                there = plane[run.block : run.block + run.blocks] if run.blocks else plane[run.block, self._part(run)]
                if not there.flags.c_contiguous:
                    return None
                found.append(there.reshape(-1).view(np.uint8).data)
        return found

    def _views(self, plane: Raw, part: Raw, run: Run) -> tuple[Raw, Raw]:
        here = part[run.start : run.stop]
        if not run.blocks:
            return plane[run.block, self._part(run), self._heads], here
        there = plane[run.block : run.block + run.blocks, :, self._heads]
        return there, here.reshape(there.shape)

    @staticmethod
    def _part(run: Run) -> slice:
        return slice(run.offset, run.offset + run.stop - run.start)


def place(
    spec: KVSpec, tiles: Iterable[Tile], block_ids: Sequence[int], num_tokens: int
) -> list[tuple[Tile, Placement]]:
    """Say for each tile of a request where in a rank's cache it lies.

    Parameters
    ----------
    block_ids
        The request's blocks in this rank's cache, in order of this rank's tokens.
    num_tokens
        Tokens of the request over all sequence-parallel ranks.

    Raises
    ------
    ConfigError
        The blocks do not hold this rank's tokens.
    """
    held = spec.tokens_of(spec.rank.sp, num_tokens)
    if len(block_ids) * spec.block_size < len(held):
        raise ConfigError(f"{len(block_ids)} blocks of {spec.block_size} do not hold {len(held)} tokens")
    return [(tile, Placement(spec, tile.heads, tile.tokens, held, block_ids)) for tile in tiles]

"""KV caches for tests: filled and checked by plain indexing of the documented layouts, away from the code under test."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import Any

import numpy as np

from omni_connector_contract_tests.harness.worker import Acting
from omni_connector_core import OmniConnectorError
from omni_connector_core.kv import KVReceiver, KVSender, KVSpec

STALE = 0xEE
"""What a consumer's blocks hold before."""

DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "uint8": np.uint8,
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
}


def shape_of(spec: KVSpec, heads: int, blocks: int) -> tuple[int, ...]:
    """Shape of one layer's cache (for ``separate``, of K and of V)."""
    size, block = spec.head_size, spec.block_size
    return {
        "kv_first": (2, blocks, block, heads, size),
        "block_first": (blocks, 2, block, heads, size),
        "heads_first": (2, blocks, heads, block, size),
        "separate": (blocks, block, heads, size),
        "latent": (blocks, block, size),
    }[spec.layout]


def cell(layer: int, plane: int, token: int, head: int, nbytes: int) -> np.ndarray[Any, Any]:
    """Raw bytes of one head of one token: the same wherever it is computed, different everywhere."""
    seed = f"{layer}/{plane}/{token}/{head}".encode()
    return np.frombuffer(hashlib.shake_128(seed).digest(nbytes), np.uint8)


def span_of(count: int, size: int, rank: int) -> range:
    """Which heads a tensor-parallel rank holds, spelt out."""
    if size <= count:
        return range(rank * (count // size), (rank + 1) * (count // size))
    return range(rank * count // size, rank * count // size + 1)


def tokens_of(num_tokens: int, size: int, rank: int) -> range:
    """Which tokens a sequence-parallel rank holds, spelt out."""
    split = np.array_split(np.arange(num_tokens), size)[rank]
    return range(int(split[0]), int(split[-1]) + 1) if len(split) else range(0)


class Cache:
    """One rank's paged cache.

    Parameters
    ----------
    spec
        With the rank in it.
    num_tokens
        Of the request.
    order
        Permutes the block ids: ``neighbours`` or ``scattered``.
    """

    def __init__(self, spec: KVSpec, num_tokens: int, order: str = "scattered") -> None:
        self.spec, self.num_tokens = spec, num_tokens
        tp, pp, sp = spec.rank
        self.heads = span_of(spec.num_kv_heads, spec.tp_size, tp)
        self.tokens = tokens_of(num_tokens, spec.sp_size, sp)
        self.layers = range(*spec.pp_ranges[pp])
        count = -(-max(len(self.tokens), 1) // spec.block_size)
        self.block_ids = [2 + n for n in range(count)]
        if order == "scattered":
            self.block_ids = self.block_ids[1::2] + self.block_ids[0::2]
        shape = shape_of(spec, len(self.heads), count + 3)
        dtype = np.dtype(DTYPES[spec.dtype])

        def empty() -> np.ndarray[Any, Any]:
            return np.full((*shape[:-1], shape[-1] * dtype.itemsize), STALE, np.uint8).view(dtype)

        self.caches: list[Any] = [(empty(), empty()) if spec.layout == "separate" else empty() for _ in self.layers]

    def _cell(self, cache: Any, plane: int, block: int, offset: int, head: int) -> np.ndarray[Any, Any]:
        layout = self.spec.layout
        if layout == "separate":
            found = cache[plane][block, offset, head]
        elif layout == "kv_first":
            found = cache[plane, block, offset, head]
        elif layout == "block_first":
            found = cache[block, plane, offset, head]
        elif layout == "heads_first":
            found = cache[plane, block, head, offset]
        else:
            found = cache[block, offset]
        raw: np.ndarray[Any, Any] = found.view(np.uint8)
        return raw

    def _cells(self, layers: range) -> Any:
        planes = 1 if self.spec.layout == "latent" else 2
        for layer in layers:
            cache = self.caches[layer - self.layers.start]
            for n, token in enumerate(self.tokens):
                block, offset = self.block_ids[n // self.spec.block_size], n % self.spec.block_size
                for h, head in enumerate(self.heads):
                    for plane in range(planes):
                        there = self._cell(cache, plane, block, offset, h)
                        yield there, cell(layer, plane, token, head, there.nbytes)

    def fill(self) -> None:
        """Write what a model would have computed."""
        for there, values in self._cells(self.layers):
            there[:] = values

    def faults(self, layers: range | None = None) -> int:
        """Count the cells that do not hold what the model would have computed."""
        return sum(not np.array_equal(there, values) for there, values in self._cells(layers or self.layers))

    def untouched(self) -> bool:
        """Whether nothing was ever written into the cache."""
        parts = [part for cache in self.caches for part in (cache if isinstance(cache, tuple) else [cache])]
        return all(bool((part.view(np.uint8) == STALE).all()) for part in parts)


def send(
    acting: Acting,
    spec: KVSpec,
    consumer: KVSpec,
    request_id: str,
    num_tokens: int,
    *,
    layers: int | None = None,
    fail: str | None = None,
    **options: Any,
) -> int:
    """Send a filled cache, or its first layers; returns how many payloads that took.

    Parameters
    ----------
    layers
        Stop after so many layers and keep the send.
    fail
        Then fail the rest, with this reason.
    """
    cache = Cache(spec, num_tokens)
    cache.fill()
    sending = KVSender(acting.connector, spec, consumer, cache.caches).open(
        request_id, cache.block_ids, num_tokens, **options
    )
    acting.kept[f"send {request_id}"] = sending
    before = acting.connector.stats()["puts"]
    if layers is None:
        sending.send_all()
    else:
        for _ in range(layers):
            sending.send_layer()
    if fail is not None:
        sending.fail(fail)
    return int(acting.connector.stats()["puts"] - before)


def send_on(acting: Acting, request_id: str) -> None:
    """Send one more layer of a kept send."""
    acting.kept[f"send {request_id}"].send_layer()


def fail_send(acting: Acting, request_id: str, reason: str) -> None:
    """Fail what a kept send has not sent."""
    acting.kept[f"send {request_id}"].fail(reason)


def receive(
    acting: Acting,
    spec: KVSpec,
    producer: KVSpec,
    request_id: str,
    num_tokens: int,
    *,
    layers: int | None = None,
    order: str = "scattered",
    **options: Any,
) -> dict[str, Any]:
    """Receive a cache and tell what came of it.

    Parameters
    ----------
    layers
        Leave after so many layers.
    """
    cache = Cache(spec, num_tokens, order)
    receiver = KVReceiver(acting.connector, spec, producer, cache.caches)
    error, received = None, None
    try:
        with receiver.open(request_id, cache.block_ids, num_tokens, **options) as received:
            for n, _ in enumerate(received):
                if layers is not None and n + 1 == layers:
                    break
    except OmniConnectorError as raised:
        error = raised
    assert received is not None
    complete = range(cache.layers.start, cache.layers.start + received.layers_received)
    return {
        "faults": cache.faults(complete) if len(complete) else 0,
        "error": error,
        "layers": received.layers_received,
        "invalid": received.invalid_blocks,
        "blocks": cache.block_ids,
        "reuse": received.reuse_length,
        "tokens": len(cache.tokens),
        "untouched": cache.untouched(),
        "at_s": time.monotonic(),
    }


def send_blank(acting: Acting, spec: KVSpec, num_tokens: int, **options: Any) -> None:
    """Send a large cache of nothing in particular, failing what is not sent when an exception leaves."""
    cache = Cache(spec, num_tokens)
    with KVSender(acting.connector, spec, spec, cache.caches).open(
        "r", cache.block_ids, num_tokens, **options
    ) as sending:
        sending.send_all()


def receive_blank(acting: Acting, spec: KVSpec, num_tokens: int) -> OmniConnectorError | None:
    """Receive what `send_blank` sends; returns the error that ended it."""
    cache = Cache(spec, num_tokens)
    try:
        with KVReceiver(acting.connector, spec, spec, cache.caches).open("r", cache.block_ids, num_tokens) as received:
            received.all()
    except OmniConnectorError as error:
        return error
    return None


def of_rank(spec: KVSpec, number: int) -> KVSpec:
    """Return a side's spec with the rank of that number in it."""
    rank = next(rank for rank in spec.ranks() if spec.number_of(rank) == number)
    return replace(spec, tp_rank=rank.tp, pp_rank=rank.pp, sp_rank=rank.sp)

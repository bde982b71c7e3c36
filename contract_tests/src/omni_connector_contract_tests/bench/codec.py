"""The codec alone: payloads of many small parts, against a bound in time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from omni_connector_contract_tests.bench.ratio import Ratio
from omni_connector_core.codec import Codec

__all__ = ["measure"]

MANY_S, FEW_S = 1e-3, 25e-6


def measure() -> Iterator[Ratio]:
    """Time encode and decode together."""
    many = {"tokens": [_tensor(512, n) for n in range(500)]}
    few = {"hidden": _tensor(65_536, 1), "residual": _tensor(65_536, 2), "logits": _tensor(65_536, 3)}
    yield Ratio("encode + decode 500 tensors of 512 B in at most 1 ms", _median_s(many, 50), MANY_S, 1.0)
    yield Ratio("encode + decode 3 tensors of 64 KB in at most 25 us", _median_s(few, 2000), FEW_S, 1.0)


def _tensor(nbytes: int, seed: int) -> Any:
    array = np.full(nbytes // 4, seed, np.float32)
    try:
        import torch
    except ImportError:
        return array
    return torch.from_numpy(array)


def _median_s(payload: Any, rounds: int) -> float:
    """Return the median time to encode and to decode; the memcpy between is not counted."""
    codec, times = Codec(), []
    for _ in range(rounds):
        started_s = time.perf_counter()
        frame = codec.encode(payload)
        encoded_s = time.perf_counter()
        memory = bytearray(frame.nbytes)
        frame.write_into(memory)
        arrived_s = time.perf_counter()
        codec.decode(memory)
        times.append(encoded_s - started_s + time.perf_counter() - arrived_s)
    return sorted(times)[rounds // 2]

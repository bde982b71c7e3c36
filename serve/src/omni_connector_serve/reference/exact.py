"""Arithmetic whose result does not depend on the order in which it is done.

Every operand of a sum is a multiple of a power of two and bounded, so that float64 holds every partial sum exactly; the
other operations are ``+``, ``*``, ``/``, ``sqrt`` and rounding, which IEEE 754 defines to the last bit. Thread count,
BLAS, chunk size, padding and the number of tensor-parallel ranks therefore cannot change a result, and a
pipeline over any connector can be compared with a single process by ``==``.

The bounds, in bits: an activation is ``ACTIVATION_BITS`` behind the point and less than 2**8; a weight likewise and at
most 2. A dot product of 1,024 of them needs 24 + 1 + 8 + 10 = 43 bits of the 53 that float64 has.
"""

from __future__ import annotations

import torch
from torch import Tensor

ACTIVATION_BITS = 12
LIMIT = 2.0**8 - 2.0**-ACTIVATION_BITS
"""The largest activation; with 12 bits behind the point it also fits float32, in which activations travel."""

_SCORE_BITS = 20
_EXP_SQUARINGS = 10


def snap(x: Tensor, bits: int = ACTIVATION_BITS) -> Tensor:
    """Round to multiples of ``2**-bits`` and clamp to ``LIMIT``; float64 in, float64 out."""
    scale = 2.0**bits
    return torch.round(x * scale).div_(scale).clamp_(-LIMIT, LIMIT)


def rms_norm(x: Tensor) -> Tensor:
    """Scale each row of `x` (tokens, width) to a root mean square of one."""
    mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return snap(x / torch.sqrt(mean_square + 2.0**-10))


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Grouped-query attention.

    Parameters
    ----------
    query : (tokens, heads, head_size)
    key, value : (context, kv_heads, head_size)
    mask : (tokens, context), optional
        True where a token may look.

    Returns
    -------
    (tokens, heads * head_size)
    """
    tokens, heads, size = query.shape
    group = heads // key.shape[1]
    key = key.repeat_interleave(group, dim=1)
    value = value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / size**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = snap(_exp(scores - scores.amax(-1, keepdim=True)), _SCORE_BITS)
    mixed = torch.einsum("hqk,khd->qhd", weights, value)
    return snap(mixed / weights.sum(-1).T.unsqueeze(-1)).reshape(tokens, heads * size)


def _exp(x: Tensor) -> Tensor:
    """``exp`` for x <= 0 as ``(1 + x / n) ** n``: libraries' own differ in the last bit between vector and scalar code."""
    y = 1.0 + x.clamp(min=-32.0) / 2.0**_EXP_SQUARINGS
    for _ in range(_EXP_SQUARINGS):
        y = y * y
    return torch.where(x == -torch.inf, 0.0, y)

"""Round trips of payloads that hypothesis makes up."""

from __future__ import annotations

from typing import Any

import codec_cases as cases
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from omni_connector_core.codec import Codec
from omni_connector_core.codec.dtypes import TORCH_DTYPES
from omni_connector_core.frame import FrameLayout, scatter_plan

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.complex_numbers(allow_nan=True)
    | st.text(st.characters(codec=None, exclude_categories=()))
    | st.binary(max_size=2000)
)
KEYS = st.recursive(ATOMS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
TENSORS = st.builds(
    cases.tensor,
    st.sampled_from([getattr(torch, name) for name in TORCH_DTYPES]),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.integers(0, 99),
)
ARRAYS = npst.arrays(
    npst.scalar_dtypes() | npst.array_dtypes(allow_subarrays=True),
    npst.array_shapes(min_dims=0, min_side=0, max_side=4),
)
LEAVES = (
    ATOMS
    | TENSORS
    | ARRAYS
    | st.builds(bytearray, st.binary(max_size=2000))
    | st.sampled_from([*cases.Color, *cases.Level, *cases.Word, cases.Rights(3), torch.Size([2]), torch.bits8])
    | st.lists(TENSORS, min_size=1, max_size=1).flatmap(lambda one: st.integers(8, 12).map(lambda n: one * n))
)
PAYLOADS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=10)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=5)
        | st.sets(KEYS, max_size=5)
        | st.builds(cases.Plain, inner, inner)
        | st.builds(cases.Frozen, inner, inner)
        | st.builds(cases.Struct, inner, inner)
        | st.builds(cases.Point, inner, inner)
    ),
    max_leaves=12,
)

SETTINGS = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@SETTINGS
@given(payload=PAYLOADS, copy=st.booleans())
def test_what_goes_in_comes_out(payload: Any, copy: bool) -> None:
    assert cases.same(cases.round_trip(payload, copy=copy), payload)


@SETTINGS
@given(payload=PAYLOADS)
def test_a_decoded_payload_encodes_to_the_same_bytes(payload: Any) -> None:
    first = bytes(cases.write(Codec(), payload))
    again = bytes(cases.write(Codec(), Codec().decode(first)))
    if not any_set(payload):  # whose order may differ
        assert again == first


def any_set(payload: Any) -> bool:
    if isinstance(payload, (set, frozenset)):
        return True
    if isinstance(payload, dict):
        return any(map(any_set, payload)) or any(map(any_set, payload.values()))
    if isinstance(payload, (list, tuple)):
        return any(map(any_set, payload))
    if isinstance(payload, (cases.Plain, cases.Frozen, cases.Struct)):
        return any(any_set(getattr(payload, name)) for name in ("a", "b", "x", "y") if hasattr(payload, name))
    return False


@given(
    lengths=st.lists(st.integers(0, 300), max_size=8),
    cuts=st.lists(st.floats(0, 1), max_size=8),
)
def test_a_scatter_plan_covers_every_byte_once(lengths: list[int], cuts: list[float]) -> None:
    layout = FrameLayout.parse_head(Codec().encode([np.zeros(n, np.uint8) for n in lengths]).head)
    total = sum(lengths)
    ends = sorted(int(cut * total) for cut in cuts)
    sizes = [b - a for a, b in zip([0, *ends], [*ends, total], strict=True)]
    source = [at + i for at, n in zip(layout.offsets, lengths, strict=True) for i in range(n)]
    target = [(index, i) for index, n in enumerate(sizes) for i in range(n)]
    plan = scatter_plan(layout, sizes)
    assert all(nbytes for *_, nbytes in plan)
    assert [at + i for at, _, _, n in plan for i in range(n)] == source
    assert [(index, at + i) for _, index, at, n in plan for i in range(n)] == target

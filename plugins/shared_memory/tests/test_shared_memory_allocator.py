"""The allocator against an oracle: blocks never overlap, and nothing is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_connector_shared_memory.allocator import ALIGNMENT, FreeSpace

STEPS = st.lists(
    st.one_of(st.integers(1, 300_000), st.integers(1, 200).map(lambda n: n * 64), st.integers(-50, -1)), max_size=200
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_blocks_never_overlap_and_all_comes_back(steps: list[int]) -> None:
    """A positive step takes so many bytes, a negative one gives one of the taken blocks back."""
    space = FreeSpace()
    space.grow(1 << 20)
    held: dict[int, int] = {}
    for step in steps:
        if step < 0 and held:
            start = sorted(held)[step % len(held)]
            space.give(start)
            del held[start]
        elif step > 0:
            start_or_none = space.take(step)
            if start_or_none is None:
                assert space.taken + step > (1 << 20) - space.taken or held
            else:
                held[start_or_none] = step
        blocks = sorted(held.items())
        assert all(start % ALIGNMENT == 0 for start, _ in blocks)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(blocks))
        assert all(start + n <= space.end for start, n in blocks)
        assert space.taken >= sum(held.values())
    for start in held:
        space.give(start)
    assert space.taken == 0
    assert space.take(1 << 20) == 0


@given(st.integers(1, 1 << 34))
def test_what_fits_the_range_can_be_taken(nbytes: int) -> None:
    space = FreeSpace()
    space.grow(-(-nbytes // 4096) * 4096)
    assert space.take(nbytes) == 0


def test_growth_counts_what_is_free_at_the_end() -> None:
    space = FreeSpace()
    space.grow(8192)
    assert space.take(4096) == 0
    assert space.lacking(8192) == 4096
    space.grow(4096)
    assert space.take(8192) == 4096


@pytest.mark.parametrize("nbytes", [1000, 1_000_000])
def test_a_block_is_reused_before_untouched_memory_is(nbytes: int) -> None:
    space = FreeSpace()
    space.grow(1 << 24)
    blocks = [space.take(nbytes) for _ in range(4)]
    for start in (blocks[1], blocks[2]):
        assert start is not None
        space.give(start)
    assert [space.take(nbytes), space.take(nbytes)] == [blocks[2], blocks[1]]


def test_blocks_of_many_sizes_use_the_same_memory_again() -> None:
    space = FreeSpace()
    space.grow(1 << 30)
    for n in range(1000):
        start = space.take(1_000_000 + 4096 * n)
        assert start is not None
        assert start < 100 << 20
        space.give(start)


def test_what_is_kept_for_reuse_is_given_up_for_what_does_not_fit() -> None:
    space = FreeSpace()
    space.grow(8 << 20)
    blocks = [space.take(1 << 20) for _ in range(8)]
    assert space.take(1 << 20) is None
    for start in blocks:
        assert start is not None
        space.give(start)
    assert space.take(8 << 20) == 0

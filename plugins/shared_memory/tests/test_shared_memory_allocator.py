"""The allocator against an oracle: blocks never overlap, and nothing is lost."""

from __future__ import annotations

from itertools import pairwise

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


def test_a_block_is_reused_before_untouched_memory_is() -> None:
    space = FreeSpace()
    space.grow(1 << 20)
    first = space.take(1000)
    space.take(1000)
    assert first is not None
    space.give(first)
    assert space.take(1000) == first

import gc
import itertools
import random
import threading
import time

import numpy as np
import pytest

from omni_connector_core.arena import ALIGNMENT, Arena, HostMemory
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import CapacityError, PayloadTooLargeError

SIZE = 1 << 20


@pytest.fixture
def arena():
    return Arena(HostMemory(SIZE))


def test_regions_are_aligned_disjoint_and_reused(arena):
    regions = [arena.try_allocate(n) for n in (1, 63, 64, 65, 1000)]
    assert all(region.address % ALIGNMENT == 0 for region in regions)
    spans = sorted((region.offset, region.size) for region in regions)
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(spans))
    arena.release(regions[0])
    assert arena.try_allocate(10).offset == regions[0].offset


def test_random_use_never_overlaps_and_ends_whole(arena):
    rng = random.Random(5)
    live = {}
    for _ in range(5000):
        if live and rng.random() < 0.5:
            region = live.pop(rng.choice(list(live)))
            view = np.frombuffer(region.buffer(), np.uint8)
            assert (view == region.offset // ALIGNMENT % 251).all()
            arena.release(region)
        else:
            region = arena.try_allocate(rng.randrange(1, 40_000))
            if region is not None:
                np.frombuffer(region.buffer(), np.uint8)[:] = region.offset // ALIGNMENT % 251
                live[region.offset] = region
        assert arena.used_bytes == sum(region.size for region in live.values())
    for region in live.values():
        arena.release(region)
    assert arena.used_bytes == 0
    assert arena.try_allocate(SIZE).nbytes == SIZE  # joined again into one run


def test_too_large_is_said_at_once(arena):
    with pytest.raises(PayloadTooLargeError):
        arena.allocate(SIZE + 1, Deadline(10))


def test_full_is_said_at_the_deadline(arena):
    held = arena.try_allocate(SIZE)
    start = time.monotonic()
    with pytest.raises(CapacityError, match="largest"):
        arena.allocate(100, Deadline(0.1))
    assert time.monotonic() - start >= 0.1
    arena.release(held)


def test_who_waits_gets_what_comes_back(arena):
    held = [arena.try_allocate(SIZE // 4) for _ in range(4)]
    got = []
    threads = [threading.Thread(target=lambda: got.append(arena.allocate(SIZE // 4, Deadline(30)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for region in held:
        arena.release(region)
    for thread in threads:
        thread.join(30)
    assert sorted(region.offset for region in got) == sorted(region.offset for region in held)


def test_a_small_request_does_not_wait_behind_a_large_one(arena):
    arena.try_allocate(SIZE - 4096)

    def wait_in_vain():
        with pytest.raises(CapacityError):
            arena.allocate(SIZE // 2, Deadline(1))

    large = threading.Thread(target=wait_in_vain)
    large.start()
    assert arena.allocate(4096, Deadline(0)).nbytes == 4096
    large.join()


def test_a_lease_ends_with_its_last_view_in_any_thread(arena):
    lease = arena.try_allocate(1000).lease()
    view = np.frombuffer(lease, np.uint8)[100:200]
    del lease
    gc.collect()
    assert arena.used_bytes
    holder = [view]
    del view
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    assert arena.used_bytes == 0


def test_a_view_outlives_its_arena():
    arena = Arena(HostMemory(SIZE))
    view = np.frombuffer(arena.try_allocate(1000).lease(), np.uint8)
    view[:] = 7
    del arena
    gc.collect()
    assert (view == 7).all()

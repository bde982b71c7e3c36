"""Huge pages for what Mooncake allocates."""

import contextlib
import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from omni_connector_core import Role, create_connector
from omni_connector_mooncake_store.pages import huge_pages

NBYTES = 64 << 20
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_GRANTED = _SETTING.exists() and "[never]" not in _SETTING.read_text(encoding="ascii")
granted = pytest.mark.skipif(not _GRANTED, reason="this kernel grants no huge pages")


def huge_nbytes():
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return 1024 * int(re.search(r"^AnonHugePages:\s+(\d+) kB$", rollup, re.M)[1])


@granted
def test_memory_that_is_mapped_meanwhile_lies_in_huge_pages():
    before = huge_nbytes()
    with huge_pages(NBYTES):
        memory = mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
    assert huge_nbytes() - before > NBYTES // 2


@granted
def test_what_is_put_lies_in_huge_pages(mooncake_service):
    config = {**mooncake_service.config(), "capacity_bytes": 4 * NBYTES}
    before = huge_nbytes()
    with contextlib.closing(
        create_connector("mooncake_store", config, role=Role.PRODUCER, namespace="pages")
    ) as producer:
        producer.put("k", np.ones(NBYTES, np.uint8))
        assert huge_nbytes() - before > NBYTES // 2
        producer.cleanup("k")

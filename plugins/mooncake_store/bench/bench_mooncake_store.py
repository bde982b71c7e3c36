"""The Store backend beside Mooncake's own best calls, put and get by turns, in one run.

``make bench PLUGINS=mooncake_store``. For each mode one service, one process, and two clients of each kind, so that a get crosses
from one to the other. The ways take turns at being first.

**bare** is `put_from` of the array (hard pinned, into a segment as `allocate_and_mount_segment` makes it) and `get_into` a registered
buffer that was touched before. In mode ``shared``, where an SDK call takes only memory of the shared pool, a bare put includes the
memcpy by which an array gets there, as ours must too. **ours** is `put` and `get` (metadata given), encoding and decoding included;
ours removes what was read within the get (mode ``client``) or behind it (mode ``shared``: what is timed next begins when that is
over); bare objects are removed outside the time.

Segments are touched before: the first touch of 16 MB takes longer than the put, and after a segment's worth of payloads no producer
meets it.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from omni_connector_contract_tests.bench import Bench, Ratio
from omni_connector_core import Deadline, OmniConnector, Role, create_connector
from omni_connector_core.options import parse_options
from omni_connector_mooncake_store.client import Client
from omni_connector_mooncake_store.options import MooncakeStoreOptions
from omni_connector_mooncake_store.sdk import ReplicateConfig
from omni_connector_mooncake_store.service import start

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "16 MB": 1 << 24, "256 MB": 1 << 28}
AT_LEAST = {"client": 0.9, "shared": 0.85}
JUDGED_FROM = 1 << 24
SEGMENT_NBYTES = 1 << 30


class Times:
    """Seconds that calls took, by name."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = defaultdict(list)

    def of(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Time one call."""
        start_s = time.perf_counter()
        result = call(*args)
        self._times[name].append(time.perf_counter() - start_s)
        return result

    def median(self, name: str) -> float:
        """Return the median, the first two left out."""
        return statistics.median(self._times[name][2:])


class Raw:
    """The vendor's calls: a client that puts, one that gets, and a buffer of the largest size for each."""

    def __init__(self, options: MooncakeStoreOptions) -> None:
        self._shared = options.mode == "shared"
        self._putter, self._getter = Client(options, Deadline(20)), Client(options, Deadline(20))
        self._config = ReplicateConfig()
        self._config.with_hard_pin = True
        if self._putter.name is not None:
            self._config.preferred_segment = self._putter.name
            assert self._putter.sdk.allocate_and_mount_segment(SEGMENT_NBYTES, options.protocol)["ret"] == 0
        largest = max(SIZES.values())
        self._from = self._putter.allocate(largest, Deadline(20))
        self._into = self._getter.allocate(largest, Deadline(20))
        np.frombuffer(self._into.buffer(), np.uint8)[:] = 1

    def put(self, key: str, source: np.ndarray) -> None:
        """Put an array."""
        address = source.ctypes.data
        if self._shared:
            ctypes.memmove(self._from.address, address, source.nbytes)
            address = self._from.address
        assert self._putter.sdk.put_from(key, address, source.nbytes, self._config) == 0

    def get(self, key: str, nbytes: int) -> None:
        """Get into the buffer."""
        assert self._getter.sdk.get_into(key, self._into.address, nbytes) == nbytes

    def remove(self, key: str) -> None:
        """Remove."""
        self._getter.sdk.remove(key, True)


def touch_segments(raw: Raw, producer: OmniConnector, consumer: OmniConnector) -> None:
    """Put and get a segment's worth of payloads, and then some: they do not land one behind the other."""
    source = np.ones(SIZES["16 MB"], np.uint8)
    count = SEGMENT_NBYTES // source.nbytes
    for n in range(3 * count // 2):
        producer.put(f"touch-{n}", {"hidden": source})
        consumer.get(f"touch-{n}")
    kept = count // 2
    for n in range(count + kept):
        if n >= kept:
            raw.remove(f"bare-{n - kept}")
        if n < count:
            raw.put(f"bare-{n}", source)


def by_turns(raw: Raw, producer: OmniConnector, consumer: OmniConnector, nbytes: int, count: int) -> Times:
    """Put and get in both ways, by turns."""
    source, times = np.ones(nbytes, np.uint8), Times()

    def bare(key: str) -> None:
        times.of("bare put", raw.put, key, source)
        times.of("bare get", raw.get, key, nbytes)
        raw.remove(key)

    def ours(key: str) -> None:
        metadata = times.of("put", producer.put, key, {"hidden": source})
        payload = times.of("get", consumer.get, key, metadata)
        assert payload["hidden"].nbytes == nbytes
        del payload
        raw.remove(key)  # answered after what was asked before

    def ours_by_key(key: str) -> None:
        producer.put(key, {"hidden": source})
        times.of("get by key", consumer.get, key)
        raw.remove(key)

    ways = [bare, ours, ours_by_key]
    for n in range(count):
        for way in ways:
            way(f"{way.__name__}-{nbytes}-{n}")
        ways.append(ways.pop(0))
    return times


def measure_mode(mode: str) -> Iterator[Ratio]:
    """Measure every size over a service of that mode."""
    with start(mode=mode, shared_bytes="2GiB") as service:
        config = {**service.config(), "capacity_bytes": SEGMENT_NBYTES}
        raw = Raw(parse_options(MooncakeStoreOptions, config, backend="mooncake_store"))
        # connectors with equal options share a client, which would make a local memcpy of every get
        elsewhere = {**config, "arena_bytes": "640MiB"}
        with (
            create_connector("mooncake_store", config, role=Role.PRODUCER, namespace="bench") as producer,
            create_connector("mooncake_store", elsewhere, role=Role.CONSUMER, namespace="bench") as consumer,
        ):
            touch_segments(raw, producer, consumer)
            for size, nbytes in SIZES.items():
                times = by_turns(raw, producer, consumer, nbytes, 20 if nbytes > 1 << 24 else 60)
                bar = 1 / AT_LEAST[mode] if nbytes >= JUDGED_FROM else None
                yield from ratios(f"{size}, mode {mode}", times, bar)


def ratios(name: str, times: Times, bar: float | None) -> Iterator[Ratio]:
    """Compare the ways."""
    bare_put, bare_get = times.median("bare put"), times.median("bare get")
    yield Ratio(f"{name}, put, against bare put_from", times.median("put"), bare_put, bar)
    yield Ratio(f"{name}, get, against bare get_into", times.median("get"), bare_get, bar)
    yield Ratio(f"{name}, get by key, against bare get_into", times.median("get by key"), bare_get)


def measure(bench: Bench) -> Iterator[Ratio]:
    """Measure both modes."""
    for mode in AT_LEAST:
        yield from measure_mode(mode)

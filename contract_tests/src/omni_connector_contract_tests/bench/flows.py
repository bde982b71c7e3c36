"""How fast streams and KV flows are, each beside what it is measured by: a memcpy, a one-shot transfer, or a bound in time.

Everything is measured several times and the best counts, of the measured and of its reference alike: what else runs on the machine
only ever adds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np

from omni_connector_contract_tests.bench.ratio import Ratio
from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.peers import Peers
from omni_connector_contract_tests.harness.worker import Acting
from omni_connector_core.kv import KVReceiver, KVSender, KVSpec, plan

__all__ = ["measure"]

PATIENCE_S = 120.0
NBYTES = 256 * 2**20
LAYERS, HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
TOKENS = NBYTES // (LAYERS * 2 * HEADS * HEAD_SIZE * 2)
BLOCKS = TOKENS // BLOCK_SIZE
CHUNKS, CHUNK_NBYTES = 10_000, 1024
_requests = count()


def measure(backend: Backend, *, rounds: int = 7) -> Iterator[Ratio]:
    """Measure the flows of a backend that crosses processes."""
    peers = Peers(processes=True, patience_s=PATIENCE_S)
    try:
        for part in (_kv_one_to_one, _kv_two_to_one, _first_chunk, _many_chunks):
            ends = Ends(backend, peers)
            yield part(ends, rounds)
            ends.close()
        yield _planning(rounds)
    finally:
        peers.shutdown()


# ---- KV caches


def spec(tp_size: int, tp_rank: int | None = None) -> KVSpec:
    """Describe a side: 256 MB in 32 layers over all of its ranks."""
    return KVSpec(
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_size=HEAD_SIZE,
        block_size=BLOCK_SIZE,
        dtype="float16",
        tp_size=tp_size,
        tp_rank=tp_rank,
    )


def prepare(acting: Acting, own: KVSpec, other: KVSpec, role: str) -> None:
    """Allocate a rank's cache, touch it, and keep what sends it or receives into it."""
    shape = (2, BLOCKS + 4, BLOCK_SIZE, HEADS // own.tp_size, HEAD_SIZE)
    sends = role == "producer"
    caches = [np.full(shape, layer + 1 if sends else 0, np.uint16).view(np.float16) for layer in range(LAYERS)]
    acting.kept["caches"] = caches
    acting.kept["flow"] = (KVSender if sends else KVReceiver)(acting.connector, own, other, caches)


def flow(acting: Acting, request_id: str) -> tuple[float, float]:
    """Send or receive a request; returns when that began and when it was done (CLOCK_MONOTONIC)."""
    block_ids = list(range(2, 2 + BLOCKS))
    started_s = time.monotonic()
    match acting.kept["flow"]:
        case KVSender() as sender:
            with sender.open(request_id, block_ids, TOKENS) as sending:
                sending.send_all()
        case KVReceiver() as receiver:
            with receiver.open(request_id, block_ids, TOKENS, replica=0) as receiving:
                receiving.all()
    return started_s, time.monotonic()


def arrived(acting: Acting) -> bool:
    """Whether every layer holds what was sent."""
    caches = acting.kept["caches"]
    return all(bool((cache[:, 2 : 2 + BLOCKS].view(np.uint16) == n + 1).all()) for n, cache in enumerate(caches))


def two_copies(acting: Acting, cycles: int) -> float:
    """Copy the cache out of its blocks and into them again, as a flow must; returns the best time, seconds."""
    blocks = [cache.view(np.uint16)[:, 2 : 2 + BLOCKS] for cache in acting.kept["caches"]]
    copies = [block.copy() for block in blocks]
    best_s = float("inf")
    for _ in range(cycles):
        started_s = time.monotonic()
        for block, copied in zip(blocks, copies, strict=True):
            np.copyto(copied, block)
            np.copyto(block, copied)
        best_s = min(best_s, time.monotonic() - started_s)
    return best_s


def _kv(ends: Ends, from_tp: int, rounds: int) -> tuple[float, float]:
    senders = [ends.open("producer", on=f"producer {rank}", rank=rank) for rank in range(from_tp)]
    for rank, sender in enumerate(senders):
        sender.act(prepare, spec(from_tp, rank), spec(1), "producer")
    ends.consumer.act(prepare, spec(1, 0), spec(from_tp), "consumer")
    best_s, reference_s = float("inf"), float("inf")
    for _ in range(rounds):
        request_id = f"kv-{next(_requests)}"
        receiving = ends.consumer.start_act(flow, request_id)
        sending = [sender.start_act(flow, request_id) for sender in senders]
        started_s = min(pending.result()[0] for pending in sending)
        best_s = min(best_s, receiving.result()[1] - started_s)
        reference_s = min(reference_s, ends.consumer.act(two_copies, 2))
    assert ends.consumer.act(arrived), "the cache did not arrive as it was sent"
    return best_s, reference_s


def _kv_one_to_one(ends: Ends, rounds: int) -> Ratio:
    return Ratio("KV 256 MB, 32 layers, tp 1 -> 1, beside its two memcpys", *_kv(ends, 1, rounds), 1.4)


def _kv_two_to_one(ends: Ends, rounds: int) -> Ratio:
    return Ratio("KV 256 MB, 32 layers, tp 2 -> 1, beside its two memcpys", *_kv(ends, 2, rounds), 1.8)


def _planning(rounds: int) -> Ratio:
    times = []
    for n in range(rounds + 1):
        sides = (
            KVSpec(num_layers=80, num_kv_heads=8, head_size=128, block_size=16, dtype="bfloat16", tp_size=8),
            KVSpec(num_layers=80, num_kv_heads=8, head_size=128, block_size=16, dtype="bfloat16"),
        )
        started_s = time.perf_counter()
        way = plan(*sides, 4096 + n)
        for rank in sides[0].ranks():
            way.sent_by(rank)
        times.append(time.perf_counter() - started_s)
    return Ratio("planning 80 layers x 8 ranks, beside 2 ms", min(times[1:]), 2e-3, 1.0)


# ---- streams


def put_one(acting: Acting, request_id: str, nbytes: int) -> float:
    """Put a payload; returns when that began."""
    chunk = np.ones(nbytes, np.uint8)
    started_s = time.monotonic()
    acting.connector.put(request_id, chunk)
    return started_s


def get_one(acting: Acting, request_id: str) -> float:
    """Get a payload; returns when it was here."""
    acting.connector.get(request_id)
    return time.monotonic()


def write_one(acting: Acting, request_id: str, nbytes: int) -> float:
    """Write a stream of one chunk and its end; returns when that began."""
    chunk = np.ones(nbytes, np.uint8)
    started_s = time.monotonic()
    with acting.connector.writer(request_id) as writer:
        writer.write(chunk)
    return started_s


def read_first(acting: Acting, request_id: str) -> float:
    """Read a stream; returns when its first chunk was here."""
    reader = acting.connector.reader(request_id)
    next(reader)
    came_s = time.monotonic()
    for _ in reader:
        pass
    return came_s


def write_many(acting: Acting, request_id: str) -> float:
    """Write a stream of small chunks; returns when that began."""
    chunk = b"c" * CHUNK_NBYTES
    started_s = time.monotonic()
    with acting.connector.writer(request_id) as writer:
        for _ in range(CHUNKS):
            writer.write(chunk)
    return started_s


def read_many(acting: Acting, request_id: str) -> tuple[int, float]:
    """Read a stream; returns how many chunks there were, and when the last was here."""
    chunks = sum(1 for _ in acting.connector.reader(request_id))
    return chunks, time.monotonic()


def _one_way(ends: Ends, send: Any, receive: Any, rounds: int, nbytes: int) -> float:
    best_s = float("inf")
    for _ in range(rounds):
        request_id = f"way-{next(_requests)}"
        receiving = ends.consumer.start_act(receive, request_id)
        ends.consumer.exists("nothing")  # a round trip, in which the thread that receives gets to its wait
        started_s = ends.producer.act(send, request_id, nbytes)
        best_s = min(best_s, receiving.result() - started_s)
    return best_s


def _first_chunk(ends: Ends, rounds: int) -> Ratio:
    nbytes = 64 * 1024
    reference_s = _one_way(ends, put_one, get_one, 10 * rounds, nbytes)
    measured_s = _one_way(ends, write_one, read_first, 10 * rounds, nbytes)
    return Ratio("first chunk of 64 KB, beside a payload of 64 KB", measured_s, reference_s, 3.0)


def _many_chunks(ends: Ends, rounds: int) -> Ratio:
    best_s = float("inf")
    for _ in range(rounds):
        request_id = f"many-{next(_requests)}"
        reading = ends.consumer.start_act(read_many, request_id)
        started_s = ends.producer.act(write_many, request_id)
        chunks, ended_s = reading.result()
        assert chunks == CHUNKS
        best_s = min(best_s, (ended_s - started_s) / CHUNKS)
    return Ratio("each of 10,000 chunks of 1 KB, beside 25 us", best_s, 25e-6, 1.0)

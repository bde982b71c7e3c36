"""KV caches from group to group over the reference transport; every backend runs the suite's level 4 besides."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from omni_connector_core import Edge, create_connector
from omni_connector_core.errors import (
    CapacityError,
    ConfigError,
    IncompatibleKVError,
    ProducerFailedError,
    RequestAbandonedError,
)
from omni_connector_core.kv import KVReceiver, KVSender, KVSpec, receive
from omni_connector_core.kv.cache import Placement
from omni_connector_core.kv.spec import Span

LAYERS, HEADS, SIZE, TOKENS = 3, 4, 8, 21
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def spec(**fields: object) -> KVSpec:
    values: dict[str, object] = {
        "num_layers": LAYERS, "num_kv_heads": HEADS, "head_size": SIZE, "block_size": 4, "dtype": "float32",
    }  # fmt: skip
    return KVSpec(**{**values, **fields})  # type: ignore[arg-type]


def whole_cache(planes: int, heads: int, dtype: str) -> torch.Tensor:
    """``[layers, planes, tokens, heads, size]`` of bits that differ everywhere."""
    generator = torch.Generator().manual_seed(7)
    width = DTYPES[dtype].itemsize
    bits = torch.randint(0, 200, (LAYERS, planes, TOKENS, heads, SIZE * width), generator=generator, dtype=torch.uint8)
    return bits.view(DTYPES[dtype])


def paged(side: KVSpec, num_blocks: int) -> list[Any]:
    """Make a rank's empty cache, a tensor (or a pair) per layer."""
    rank = side.rank
    heads = len(side.heads_of(rank.tp))
    shapes = {
        "kv_first": (2, num_blocks, side.block_size, heads, SIZE),
        "block_first": (num_blocks, 2, side.block_size, heads, SIZE),
        "heads_first": (2, num_blocks, heads, side.block_size, SIZE),
        "separate": (num_blocks, side.block_size, heads, SIZE),
        "latent": (num_blocks, side.block_size, SIZE),
    }

    def empty() -> torch.Tensor:
        raw = torch.full((*shapes[side.layout][:-1], SIZE * side.itemsize), 255, dtype=torch.uint8)
        return raw.view(DTYPES[side.dtype])

    layers = range(*side.pp_ranges[rank.pp])
    return [(empty(), empty()) if side.layout == "separate" else empty() for _ in layers]


def cells(side: KVSpec, cache: Any, block: int, offset: int) -> torch.Tensor:
    """``[planes, heads, size]`` of one token, by plain indexing of the documented layout."""
    if side.layout == "separate":
        return torch.stack([part[block, offset].view(torch.uint8) for part in cache])
    raw = cache.view(torch.uint8)
    if side.layout == "kv_first":
        return raw[:, block, offset]
    if side.layout == "block_first":
        return raw[block, :, offset]
    if side.layout == "heads_first":
        return raw[:, block, :, offset]
    return raw[block, offset][None, None]


def blocks_for(side: KVSpec, order: str) -> list[int]:
    count = -(-TOKENS // side.block_size)
    ids = list(range(2, 2 + count))
    return ids if order == "neighbours" else [ids[n * 5 % count] if count % 5 else ids[-1 - n] for n in range(count)]


def fill(side: KVSpec, caches: list[Any], block_ids: list[int], whole: torch.Tensor) -> None:
    rank = side.rank
    heads, layers, tokens = side.heads_of(rank.tp), side.pp_ranges[rank.pp], side.tokens_of(rank.sp, TOKENS)
    for cache, layer in zip(caches, range(*layers), strict=True):
        for n, token in enumerate(range(*tokens)):
            block, offset = block_ids[n // side.block_size], n % side.block_size
            part = whole[layer, :, token, heads.start : heads.stop].contiguous().view(torch.uint8)
            if side.layout == "separate":
                for plane, values in zip(cache, part, strict=True):
                    plane[block, offset].view(torch.uint8)[...] = values
            else:
                cells(side, cache, block, offset)[...] = part


def check(side: KVSpec, caches: list[Any], block_ids: list[int], whole: torch.Tensor) -> None:
    rank = side.rank
    heads, layers, tokens = side.heads_of(rank.tp), side.pp_ranges[rank.pp], side.tokens_of(rank.sp, TOKENS)
    for cache, layer in zip(caches, range(*layers), strict=True):
        for n, token in enumerate(range(*tokens)):
            got = cells(side, cache, block_ids[n // side.block_size], n % side.block_size)
            want = whole[layer, :, token, heads.start : heads.stop].contiguous().view(torch.uint8)
            assert torch.equal(got, want), (rank, layer, token)


class Group:
    """All ranks of both sides, each with its own connector, in one process."""

    def __init__(self, namespace: str, producer: KVSpec, consumer: KVSpec, order: str = "neighbours") -> None:
        self.connectors = []
        self.whole = whole_cache(producer.planes, producer.num_kv_heads, producer.dtype)
        self.senders, self.receivers = [], []
        for side, role in ((producer, "producer"), (consumer, "consumer")):
            for rank in side.ranks():
                own = replace(side, tp_rank=rank.tp, pp_rank=rank.pp, sp_rank=rank.sp)
                conn = create_connector(
                    "memory",
                    {"timeout_s": 20},
                    edge=Edge("p", "d"),
                    role=role,
                    namespace=namespace,
                    rank=side.number_of(rank),
                )
                self.connectors.append(conn)
                block_ids = blocks_for(own, order)
                caches = paged(own, 2 + len(block_ids))
                if role == "producer":
                    fill(own, caches, block_ids, self.whole)
                    self.senders.append((KVSender(conn, own, consumer, caches), block_ids))
                else:
                    self.receivers.append((KVReceiver(conn, own, producer, caches), own, caches, block_ids))

    def transfer(self, request_id: str = "r", **options: Any) -> None:
        with ThreadPoolExecutor(32) as pool:
            sent = [pool.submit(self._send, sender, ids, request_id, options) for sender, ids in self.senders]
            got = [
                pool.submit(self._receive, receiver, own, caches, ids, request_id)
                for receiver, own, caches, ids in self.receivers
            ]
            for future in sent + got:
                future.result(30)

    def _send(self, sender: KVSender, ids: list[int], request_id: str, options: dict[str, Any]) -> None:
        with sender.open(request_id, ids, TOKENS, **options) as send:
            send.send_all()

    def _receive(self, receiver: KVReceiver, own: KVSpec, caches: list[Any], ids: list[int], request_id: str) -> None:
        with receiver.open(request_id, ids, TOKENS, replica=0) as receive:
            assert receive.invalid_blocks == ids
            assert receive.reuse_length == 0
            assert list(receive) == list(range(*own.pp_ranges[own.rank.pp]))
        assert receive.invalid_blocks == []
        assert receive.reuse_length == len(own.tokens_of(own.rank.sp, TOKENS))
        check(own, caches, ids, self.whole)

    def pending(self) -> int:
        return sum(conn.stats()["pending"] for conn in self.connectors)

    def held(self) -> int:
        return sum(conn.stats()["bytes_held"] for conn in self.connectors)

    def close(self) -> None:
        for conn in self.connectors:
            conn.close()


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Any]:
    groups: list[Group] = []

    def make(producer: KVSpec, consumer: KVSpec, order: str = "neighbours") -> Group:
        groups.append(Group(request.node.nodeid, producer, consumer, order))
        return groups[-1]

    yield make
    for made in groups:
        made.close()


@pytest.mark.parametrize(("from_tp", "to_tp"), list(itertools.product((1, 2, 4, 8), (1, 2, 4, 8))))
def test_any_tensor_parallel_pair_delivers_every_bit(group: Any, from_tp: int, to_tp: int) -> None:
    made = group(spec(tp_size=from_tp), spec(tp_size=to_tp), "scattered")
    made.transfer()
    assert made.pending() == made.held() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["kv_first", "block_first", "heads_first", "separate"])
def test_any_layout_becomes_any_other(group: Any, layout: str, dtype: str) -> None:
    group(
        spec(layout=layout, dtype=dtype), spec(layout="kv_first", tp_size=2, dtype=dtype, block_size=8), "scattered"
    ).transfer()
    group(spec(tp_size=2, dtype=dtype), spec(layout=layout, dtype=dtype, block_size=3)).transfer("r2")


def test_a_latent_cache_reaches_every_rank(group: Any) -> None:
    made = group(spec(layout="latent", num_kv_heads=1, tp_size=2), spec(layout="latent", num_kv_heads=1, tp_size=4))
    made.transfer()
    assert made.pending() == 0


@pytest.mark.parametrize(("ours", "theirs"), [(4, 8), (8, 4), (4, 3), (1, 16), (64, 4)])
def test_block_sizes_may_differ(group: Any, ours: int, theirs: int) -> None:
    for n, order in enumerate(("neighbours", "scattered")):
        group(spec(block_size=ours), spec(block_size=theirs), order).transfer(f"r{n}")


def test_pipeline_ranges_and_sequence_ranks_may_differ(group: Any) -> None:
    made = group(
        spec(pp_ranges=(Span(0, 1), Span(1, 3)), sp_size=2), spec(pp_ranges=(Span(0, 2), Span(2, 3)), tp_size=2)
    )
    made.transfer()
    made = group(spec(tp_size=2), spec(sp_size=3))
    made.transfer("r2")
    assert made.pending() == made.held() == 0


def test_several_readers_share_what_is_sent_once(group: Any) -> None:
    made = group(spec(), spec())
    sender, ids = made.senders[0]
    receiver, own, caches, own_ids = made.receivers[0]
    with sender.open("r", ids, TOKENS, readers=2) as send:
        send.send_all()
    puts = sender.connector.stats()["puts"]
    assert puts == LAYERS + 1
    for _ in range(2):
        made._receive(receiver, own, caches, own_ids, "r")
    assert made.pending() == made.held() == 0


def test_a_layer_is_copied_once_on_each_side_and_put_once(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: dict[str, list[int]] = {"gather": [], "scatter": []}
    for name, nbytes in copied.items():
        method = getattr(Placement, name)

        def counting(self: Any, planes: Any, tile: Any, method: Any = method, nbytes: list[int] = nbytes) -> None:
            nbytes.append(tile.nbytes)
            method(self, planes, tile)

        monkeypatch.setattr(Placement, name, counting)
    made = group(spec(), spec(tp_size=2), "scattered")
    made.transfer()
    whole = 2 * TOKENS * HEADS * SIZE * 4
    assert copied["gather"] == copied["scatter"] == [whole // 2] * 2 * LAYERS
    sender, _ = made.senders[0]
    assert sender.connector.stats()["puts"] == 2 * LAYERS + 1
    assert sender.connector.stats()["put_bytes"] < LAYERS * whole * 1.1


@pytest.fixture
def every_tile_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "LARGE_TILE_NBYTES", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 4)


@pytest.mark.usefixtures("every_tile_is_large")
def test_the_tiles_of_a_layer_are_received_side_by_side(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    side_by_side = threading.Barrier(4, timeout=30)
    scatter = Placement.scatter

    def together(self: Any, planes: Any, tile: Any) -> None:
        side_by_side.wait()
        scatter(self, planes, tile)

    monkeypatch.setattr(Placement, "scatter", together)
    made = group(spec(tp_size=4), spec(tp_size=1), "scattered")
    made.transfer()
    assert made.pending() == made.held() == 0
    assert not [thread.name for thread in threading.enumerate() if "omni-connector-kv" in thread.name]


@pytest.mark.usefixtures("every_tile_is_large")
def test_nothing_is_written_to_the_cache_once_a_receive_has_failed(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = group(spec(tp_size=2), spec(tp_size=1))
    receiver, _, _, ids = made.receivers[0]
    failing, other = (sender.open("r", blocks, TOKENS) for sender, blocks in made.senders)
    copying, failed = threading.Event(), threading.Event()
    scatter, get = Placement.scatter, receiver.connector.get
    ended = []

    def slow(self: Any, planes: Any, tile: Any) -> None:
        copying.set()
        failed.wait(30)
        scatter(self, planes, tile)
        ended.append(tile.shape)

    def get_and_tell(*args: Any, **named: Any) -> Any:
        try:
            return get(*args, **named)
        except ProducerFailedError:
            failed.set()
            raise

    monkeypatch.setattr(Placement, "scatter", slow)
    monkeypatch.setattr(receiver.connector, "get", get_and_tell)
    other.send_all()
    with ThreadPoolExecutor(1) as threads, receiver.open("r", ids, TOKENS, replica=0) as receiving:
        layer = threads.submit(receiving.receive_layer)
        assert copying.wait(30)
        failing.fail("it broke")
        with pytest.raises(ProducerFailedError):
            layer.result(30)
        assert len(ended) == 1
        assert receiving.invalid_blocks == ids
    assert not [thread.name for thread in threading.enumerate() if "omni-connector-kv" in thread.name]


def test_layers_arrive_before_the_last_is_sent(group: Any) -> None:
    made = group(spec(), spec())
    sender, ids = made.senders[0]
    receiver, _, _, own_ids = made.receivers[0]
    with sender.open("r", ids, TOKENS) as send, receiver.open("r", own_ids, TOKENS) as receive:
        for layer in range(LAYERS):
            send.send_layer(layer)
            assert receive.receive_layer() == layer
        assert receive.complete


def test_an_abort_reaches_the_consumer_and_no_block_counts_as_valid(group: Any) -> None:
    made = group(spec(), spec())
    sender, ids = made.senders[0]
    receiver, _, _, own_ids = made.receivers[0]
    with pytest.raises(ZeroDivisionError), sender.open("r", ids, TOKENS) as send:
        send.send_layer()
        raise ZeroDivisionError("at layer 1")
    with (
        pytest.raises(ProducerFailedError, match="ZeroDivisionError: at layer 1"),
        receiver.open("r", own_ids, TOKENS) as receive,
    ):
        receive.all()
    assert receive.layers_received == 1
    assert receive.invalid_blocks == own_ids
    assert receive.reuse_length == 0
    assert made.pending() == made.held() == 0


def test_a_consumer_that_leaves_frees_both_sides_and_stops_the_producer(group: Any) -> None:
    made = group(spec(), spec())
    sender, ids = made.senders[0]
    receiver, _, _, own_ids = made.receivers[0]
    send = sender.open("r", ids, TOKENS)
    send.send_layer()
    send.send_layer()
    with receiver.open("r", own_ids, TOKENS) as receive:
        receive.receive_layer()
    assert made.pending() == made.held() == 0
    with pytest.raises(RequestAbandonedError):
        send.send_layer()


def test_a_part_that_finds_no_room_fails_the_rest_and_frees_it(request: pytest.FixtureRequest) -> None:
    wide, narrow = spec(tp_size=1), spec(tp_size=4)
    with create_connector("memory", {"capacity_bytes": 9_000}, namespace=request.node.name) as conn:
        caches = paged(wide, 10)
        sender = KVSender(conn, wide, narrow, caches)
        with pytest.raises(CapacityError), sender.open("r", list(range(6)), TOKENS, timeout=0.05) as send:
            send.send_all()
        receiver = KVReceiver(conn, replace(narrow, tp_rank=3), wide, paged(replace(narrow, tp_rank=3), 10))
        with (
            pytest.raises(ProducerFailedError, match="CapacityError"),
            receiver.open("r", list(range(6)), TOKENS) as receive,
        ):
            receive.all()
        assert receive.invalid_blocks
        assert conn.stats()["pending"] == conn.stats()["bytes_held"] == 0


@pytest.mark.parametrize(
    ("told", "field"),
    [({"tp_size": 2}, "tp_size"), ({"pp_ranges": (Span(0, 1), Span(1, 3))}, "pp_ranges"), ({"sp_size": 2}, "sp_size")],
)
def test_sides_that_disagree_about_each_other_find_out_before_bytes_move(
    request: pytest.FixtureRequest, told: dict[str, Any], field: str
) -> None:
    with create_connector("memory", namespace=request.node.name) as conn:
        send = KVSender(conn, spec(), spec(**told), paged(spec(), 10)).open("r", list(range(6)), TOKENS)
        caches = paged(spec(), 10)
        before = [cache.clone() for cache in caches]
        with (
            pytest.raises(IncompatibleKVError) as caught,
            KVReceiver(conn, spec(), spec(), caches).open("r", list(range(6)), TOKENS) as receive,
        ):
            receive.all()
        assert caught.value.field == field
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, caches, strict=True))
        with pytest.raises(RequestAbandonedError):
            send.send_all()


def test_another_number_of_tokens_is_found_out(request: pytest.FixtureRequest) -> None:
    with create_connector("memory", namespace=request.node.name) as conn:
        KVSender(conn, spec(), spec(), paged(spec(), 10)).open("r", list(range(6)), TOKENS)
        receive = KVReceiver(conn, spec(), spec(), paged(spec(), 10)).open("r", list(range(6)), TOKENS - 1)
        with pytest.raises(IncompatibleKVError, match="21 tokens"):
            receive.all()


def test_a_cache_that_is_not_what_the_spec_says_is_refused(request: pytest.FixtureRequest) -> None:
    with create_connector("memory", namespace=request.node.name) as conn:
        for wrong in (spec(block_size=5), spec(dtype="float16"), spec(layout="block_first")):
            with pytest.raises(IncompatibleKVError):
                KVSender(conn, spec(), spec(), paged(wrong, 10))
        with pytest.raises(ConfigError, match="2 caches for the 3 layers"):
            KVSender(conn, spec(), spec(), paged(spec(), 10)[:2])
        with pytest.raises(ConfigError, match="do not hold"):
            KVSender(conn, spec(), spec(), paged(spec(), 10)).open("r", [1, 2], TOKENS)

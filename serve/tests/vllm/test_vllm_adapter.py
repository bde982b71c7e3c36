# SPDX-License-Identifier: Apache-2.0
"""The adapter's calls, one by one, over shared memory, without a server."""

from __future__ import annotations

import itertools
import logging
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from omni_server import wait_until
from vllm.outputs import CompletionOutput, RequestOutput
from vllm_omni.core.sched.omni_scheduling_coordinator import OmniSchedulingCoordinator
from vllm_omni.data_entry_keys import CodesStruct, HiddenStatesStruct, MetaStruct, OmniPayloadStruct
from vllm_omni.distributed.omni_connectors.kv_transfer_manager import (
    KVCacheTransferData,
    OmniKVCacheConfig,
    OmniKVTransferManager,
)
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer
from vllm_omni.worker.omni_connector_model_runner_mixin import OmniConnectorModelRunnerMixin

from omni_connector_core import (
    BackendUnavailableError,
    ConfigError,
    Edge,
    OmniConnector,
    OptionError,
    PluginError,
    ProducerFailedError,
    Role,
    TransferTimeoutError,
    UnknownBackendError,
)
from omni_connector_core.options import parse_options
from omni_connector_core.services import free_ports
from omni_connector_serve.vllm_omni import backends, deployment, polls, report
from omni_connector_serve.vllm_omni.adapter import ConnectorAdapter
from omni_connector_serve.vllm_omni.extra import split_extra
from omni_connector_serve.vllm_omni.payloads import RawBuffer, wire_payload
from omni_connector_serve.vllm_omni.plugin import register
from omni_connector_shared_memory.leader import LeaderFollowers
from omni_connector_shared_memory.transport import SharedMemoryTransport

Make = Callable[..., ConnectorAdapter]
# Nothing takes so long but what never comes.
PATIENCE_S = 30.0


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv(deployment.NAMESPACE_ENV, f"test-{uuid.uuid4().hex}")
    monkeypatch.delenv(deployment.DEPLOY_ENV, raising=False)
    deployment.current_deployment.cache_clear()
    made: list[ConnectorAdapter] = []

    def make(stage: int | None = 0, name: str = "shared_memory", **extra: Any) -> ConnectorAdapter:
        given = {"timeout_s": PATIENCE_S, **extra} | ({} if stage is None else {"stage_id": stage})
        made.append(ConnectorAdapter(name, given))
        return made[-1]

    yield make
    for adapter in made:
        adapter.close()
    deployment.current_deployment.cache_clear()


def take(receiver: ConnectorAdapter, from_stage: str, to_stage: str, key: str, metadata: Any = None) -> Any:
    """What the engine's poll loop gets in the end."""
    return receiver.get_with_deadline(from_stage, to_stage, key, metadata, deadline=time.monotonic() + PATIENCE_S)


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(report.logger, "handlers", [caplog.handler])
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_full_payload(make: Make) -> None:
    sender, receiver = make(0), make(1)
    payload = {"codes": {"audio": [1, 2, 3]}, "hidden_states": {"output": torch.randn(16, 64)}}
    assert receiver.get("0", "1", "r_0_0", {"source_host": "127.0.0.1", "source_port": 50051}) is None
    ok, nbytes, metadata = sender.put("0", "1", "r_0_0", payload)
    assert ok
    assert nbytes > 4096
    assert isinstance(metadata, dict)
    got = take(receiver, "0", "1", "r_0_0", {"source_host": "127.0.0.1", "source_port": 50051})
    assert got is not None
    assert got[0]["codes"] == payload["codes"]
    assert torch.equal(got[0]["hidden_states"]["output"], payload["hidden_states"]["output"])
    assert got[1] == 4096
    assert receiver.get("0", "1", "r_0_0") is None


def test_metadata_of_a_put_leads_to_its_payload(make: Make) -> None:
    sender, receiver = make(0), make(1)
    _, _, metadata = sender.put("0", "1", "r_0_0", {"a": 1})
    assert take(receiver, "0", "1", "r_0_0", metadata) == ({"a": 1}, 0)


def test_struct_in_plain_dict_out_as_upstream_would(make: Make) -> None:
    sender, receiver = make(0), make(1)
    struct = OmniPayloadStruct(
        codes=CodesStruct(audio=torch.arange(4)),
        hidden_states=HiddenStatesStruct(output=torch.randn(2, 3)),
        meta=MetaStruct(finished=torch.tensor(True)),
        generated_len=7,
        language=["en"],
    )
    assert sender.put(from_stage="0", to_stage="1", put_key="r_0_0", data=struct)[0]
    [ours, _] = take(receiver, "0", "1", "r_0_0")
    theirs = OmniSerializer.deserialize(OmniSerializer.serialize(struct))
    assert type(ours) is dict
    assert repr(ours) == repr(theirs)


def test_struct_defaults_are_left_out_and_empty_values_are_not() -> None:
    assert wire_payload(OmniPayloadStruct(generated_len=0, language=[])) == {"generated_len": 0, "language": []}

    class Inner(msgspec.Struct):
        number: int = 3

    assert wire_payload({"a": [Inner(4)], "b": Inner()}) == {"a": [{"number": 4}], "b": {}}


def test_a_struct_is_looked_into_once_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chunk(msgspec.Struct):
        number: int = 0

    assert wire_payload(Chunk(1)) == {"number": 1}
    monkeypatch.setattr(msgspec.structs, "fields", None)
    assert wire_payload([Chunk(2), Chunk()]) == [{"number": 2}, {}]


def test_kv_cache_as_the_manager_sends_and_takes_it(make: Make) -> None:
    sender, receiver = make(None), make(None)
    layers = {"key_cache": [torch.randn(4, 2, 8)], "value_cache": [torch.randn(4, 2, 8)]}
    data = KVCacheTransferData(request_id="r", layer_blocks=layers, block_ids=[0, 1], metadata={})
    raw = data.to_bytes()
    for key, packed in (("bytes", raw), ("tensor", torch.frombuffer(bytearray(raw), dtype=torch.uint8))):
        assert sender.put(from_stage="0", to_stage="1", put_key=key, data=packed)[0]
        while (result := receiver.get(from_stage="0", to_stage="1", get_key=key, metadata=None)) is None:
            pass
        buffer, nbytes = result
        assert isinstance(buffer, RawBuffer)
        assert nbytes == len(packed)
        restored = KVCacheTransferData.from_bytes(memoryview(buffer.tensor.numpy()))
        assert torch.equal(restored["layer_blocks"]["key_cache"][0], layers["key_cache"][0])
        buffer.release()


def test_request_output_crosses_whole(make: Make) -> None:
    sender, receiver = make(0), make(1)
    completion = CompletionOutput(
        index=0, text="hi", token_ids=[1, 2], cumulative_logprob=None, logprobs=None, finish_reason="stop"
    )
    output = RequestOutput(
        request_id="r", prompt="p", prompt_token_ids=[5], prompt_logprobs=None, outputs=[completion], finished=True
    )
    output.multimodal_output = {"audio": torch.ones(3)}
    assert sender.put("0", "1", "r", {"engine_inputs": output})[0]
    [payload, _] = take(receiver, "0", "1", "r")
    got = payload["engine_inputs"]
    assert type(got) is RequestOutput
    assert type(got.outputs[0]) is CompletionOutput
    assert (got.request_id, got.outputs[0].text, got.finished) == ("r", "hi", True)
    assert torch.equal(got.multimodal_output["audio"], torch.ones(3))


def test_get_with_deadline_waits_no_longer(make: Make) -> None:
    sender, receiver = make(0), make(None)
    start = time.monotonic()
    assert receiver.get_with_deadline("0", "1", "r_0_0", None, deadline=start + 0.2) is None
    assert 0.2 <= time.monotonic() - start < PATIENCE_S / 2
    receiver.abandon_get("r_0_0")
    sender.put("0", "1", "r_0_0", {"cond": 1})
    assert take(receiver, "0", "1", "r_0_0") == ({"cond": 1}, 0)


def test_abandon_get_leaves_the_payload_for_the_next(make: Make) -> None:
    sender, receiver = make(0), make(1)
    assert receiver.get("0", "1", "r_0_0") is None
    receiver.abandon_get("r_0_0")
    sender.put("0", "1", "r_0_0", {"a": 1})
    assert take(receiver, "0", "1", "r_0_0") == ({"a": 1}, 0)


def test_put_again_replaces(make: Make) -> None:
    sender, receiver = make(0), make(1)
    assert sender.put("0", "1", "r_0_0", {"try": 1})[0]
    assert sender.put("0", "1", "r_0_0", {"try": 2})[0]
    assert take(receiver, "0", "1", "r_0_0") == ({"try": 2}, 0)


def test_cleanup_discards_and_the_key_may_come_again(make: Make) -> None:
    sender, receiver = make(0), make(1)
    sender.put("0", "1", "r_0_0", {"a": 1})
    sender.put("0", "1", "r_0_10", {"a": 10})
    sender.cleanup("r_0_0")
    sender.cleanup("r_0_0")
    assert receiver.get("0", "1", "r_0_0") is None
    assert sender.put("0", "1", "r_0_0", {"a": 2})[0]
    assert take(receiver, "0", "1", "r_0_0") == ({"a": 2}, 0)
    assert take(receiver, "0", "1", "r_0_10") == ({"a": 10}, 0)


def test_a_put_waits_for_room_and_loses_nothing(make: Make) -> None:
    sender, receiver = make(0, capacity_bytes=1 << 16), make(1)
    assert sender.put("0", "1", "r_0_0", {"x": torch.zeros(40 << 10, dtype=torch.uint8)})[0]
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(sender.put, "0", "1", "r_0_1", {"x": torch.ones(40 << 10, dtype=torch.uint8)})
        assert take(receiver, "0", "1", "r_0_0")[0]["x"].sum() == 0
        assert second.result()[0]
    assert take(receiver, "0", "1", "r_0_1")[0]["x"].sum() == 40 << 10


def test_lost_payload_is_false_is_logged_once_and_its_key_is_not_given_to_another(
    make: Make, errors: Callable[[], list[str]]
) -> None:
    sender, receiver = make(0), make(1)
    assert sender.put("0", "1", "req-1_0_3", {"not": object()}) == (False, 0, None)
    assert sender.put("0", "1", "req-1_0_3", {"the next": "chunk"}) == (False, 0, None)
    assert take(receiver, "0", "1", "req-1_0_3") is None
    assert sender.put("0", "1", "req-2_0_3", {"another": "request"})[0]
    [put, get] = errors()
    for text in ("request=req-1 ", "edge=0->1 ", "key=req-1_0_3 ", "EncodeError", "payload['not']"):
        assert text in put
    assert "ProducerFailedError" in get


class Runner(OmniConnectorModelRunnerMixin):
    """As much of a worker as polls for full payloads."""

    def __init__(self, connector: ConnectorAdapter) -> None:
        self.connector_of_mine = connector
        self._synchronous_payload_transport = False
        self._request_ids_mapping = {"internal": "r", "other": "r_0"}
        self._local_request_metadata: dict[str, Any] = {}
        self._lock = threading.Lock()

    def polls(self, key: str) -> Any:
        return self.connector_of_mine.get("0", "1", key)


def test_a_lost_full_payload_reaches_the_scheduler_and_fails_its_request(
    make: Make, errors: Callable[[], list[str]]
) -> None:
    register()
    sender, runner = make(0), Runner(make(1))
    sender.put("0", "1", "r_0_0", {"not": object()})
    wait_until(lambda: runner.polls("r_0_0") or runner._local_request_metadata, PATIENCE_S, "the worker does not tell")
    assert list(runner._local_request_metadata) == ["internal"]

    now = time.monotonic()
    coordinator = OmniSchedulingCoordinator(stage_id=1)
    coordinator._waiting_since = {"internal": now, "other": now}
    coordinator.update_request_metadata({}, runner._local_request_metadata, model_mode="generation")
    assert coordinator.collect_timed_out_request_ids(600) == {"internal"}
    assert len([line for line in errors() if "gave up: request=r " in line]) == 1


def test_a_lost_kv_cache_ends_the_wait_and_fails_the_request(make: Make) -> None:
    register()
    receiver = make(None)
    settings = {"type": "shared_memory", "stage_id": 1}
    manager = OmniKVTransferManager(
        OmniKVCacheConfig(
            settings, from_stage="0", to_stage="1", stage_id=1, engine_input_source=[0], need_recv_cache=True
        )
    )
    manager._connector = receiver
    key = "omni_0_to_1_kv_cache_r"
    make(0).put("0", "1", key, {"not": object()})
    start = time.monotonic()
    with pytest.raises(TransferTimeoutError, match="the KV cache of request r has not come"):
        manager.receive_multi_kv_cache_distributed(SimpleNamespace(request_id="r"))
    assert time.monotonic() - start < manager.config.recv_timeout / 3


def test_consumers_are_told_of_a_loss_as_soon_as_they_can_be(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = make(0), make(1)
    fail, refusals = OmniConnector.fail, iter([BackendUnavailableError("away")] * 2)

    def refuse(self: OmniConnector, *args: Any, **kwargs: Any) -> None:
        for refusal in refusals:
            raise refusal
        fail(self, *args, **kwargs)

    monkeypatch.setattr(OmniConnector, "fail", refuse)
    sender.put("0", "1", "r_0_0", {"not": object()})
    consumer = receiver._open(Edge("0", "1"), Role.CONSUMER).connector
    with pytest.raises(ProducerFailedError, match="put failed"):
        consumer.get("r_0_0", timeout=PATIENCE_S)
    wait_until(
        lambda: "omni-connector-lost" not in {t.name for t in threading.enumerate()}, PATIENCE_S, "a thread stays"
    )


def test_a_poll_loop_logs_a_failure_once_and_never_raises(make: Make, errors: Callable[[], list[str]]) -> None:
    receiver = make(1)
    bad = {"omni_connector": 99}
    assert [receiver.get("0", "1", "r_0_0", bad) for _ in range(50)] == [None] * 50
    [line] = errors()
    assert "IncompatibleMetadataError" in line


def test_the_engines_polls_ask_only_when_something_may_have_come(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedMemoryTransport, "news", lambda self: news[0])
    news = [0]
    sender, receiver = make(0), make(1)
    sender.put("0", "1", "first", {"a": 0})
    assert take(receiver, "0", "1", "first") == ({"a": 0}, 0)
    asked, poll = [], OmniConnector.poll
    monkeypatch.setattr(OmniConnector, "poll", lambda self, key, *rest: asked.append(key) or poll(self, key, *rest))
    for news[0] in (1, 2):
        assert [receiver.get("0", "1", "r_0_0") for _ in range(100)] == [None] * 100
        assert receiver.get("0", "1", "r_0_1") is None
    assert asked == ["r_0_0", "r_0_1"] * 2
    sender.put("0", "1", "r_0_0", {"a": 1})
    told = itertools.count(3)
    wait_until(
        lambda: news.insert(0, next(told)) or receiver.get("0", "1", "r_0_0") == ({"a": 1}, 0), PATIENCE_S, "unheard"
    )


def test_the_next_chunk_of_a_stream_is_asked_for_when_one_is_taken(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    edges = {Edge("0", "1"): deployment.EdgeSettings("shared_memory", {}, chunks=True)}
    monkeypatch.setattr(f"{ConnectorAdapter.__module__}.current_deployment", lambda: deployment.Deployment(edges))
    sender, receiver = make(0), make(1)
    sender.put("0", "1", "r_0_0", {"chunk": 0})
    assert take(receiver, "0", "1", "r_0_0") == ({"chunk": 0}, 0)
    sender.put("0", "1", "r_0_1", {"chunk": 1})
    wait_until(lambda: receiver.get("0", "1", "r_0_1") == ({"chunk": 1}, 0), PATIENCE_S, "it does not come")
    monkeypatch.setattr(LeaderFollowers, "until", None)  # nobody waits for an answer
    assert receiver.get("0", "1", "r_0_2") is None
    sender.put("0", "1", "r_0_2", {"chunk": 2})
    wait_until(lambda: receiver.get("0", "1", "r_0_2") == ({"chunk": 2}, 0), PATIENCE_S, "it does not come")


def test_python_calls_of_a_chunk_are_few(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two chunks the engine pushes our code out of the processor's caches: each call costs two microseconds then."""
    edges = {Edge("0", "1"): deployment.EdgeSettings("shared_memory", {}, chunks=True)}
    monkeypatch.setattr(f"{ConnectorAdapter.__module__}.current_deployment", lambda: deployment.Deployment(edges))
    sender, receiver = make(0), make(1)
    chunk = OmniPayloadStruct(
        codes=CodesStruct(audio=torch.arange(4)),
        hidden_states=HiddenStatesStruct(output=torch.ones(4, 64)),
        meta=MetaStruct(finished=torch.tensor(False)),
    )
    for number in range(3):
        puts, (ok, *_) = calls_of(lambda number=number: sender.put("0", "1", f"r_0_{number}", chunk))
        assert ok
        got = None
        while got is None:
            gets, got = calls_of(lambda number=number: receiver.get("0", "1", f"r_0_{number}"))
    # a call for each struct of the payload; the poll, the question for the next chunk, the count of bytes
    assert [puts, gets] == [
        ["put", "wire_payload", *4 * ["_without_structs"]],
        ["get", "poll", "_expect_next", "delivered", "nbytes_of"],
    ]


def calls_of(call: Callable[[], Any]) -> tuple[list[str], Any]:
    """The adapter's functions that a call calls, and its result."""
    called: list[str] = []
    adapters = str(Path(polls.__file__).parent)

    def called_now(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(adapters):
            called.append(frame.f_code.co_name)

    sys.setprofile(called_now)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return called, result


def test_a_key_for_which_the_engine_polls_no_longer_is_forgotten(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, forgotten = make(1), []
    monkeypatch.setattr(OmniConnector, "forget", lambda self, key: forgotten.append(key))
    receiver.get("0", "1", "aborted_0_0")
    receiver.get("0", "1", "r_0_0")
    assert forgotten == []
    monkeypatch.setattr(polls, "ABANDONED_S", 0.0)
    monkeypatch.setattr(receiver._open(Edge("0", "1"), Role.CONSUMER).polls, "_tidy_at_s", 0.0)
    receiver.get("0", "1", "r_0_1")
    assert forgotten == ["aborted_0_0", "r_0_0"]


def test_middle_stage_gets_and_puts_on_two_edges(make: Make) -> None:
    first, middle, last = make(0), make(1), make(2)
    first.put("0", "1", "r_0_0", {"hop": 1})
    [payload, _] = take(middle, "0", "1", "r_0_0")
    assert middle.put("1", "2", "r_1_0", {"hop": payload["hop"] + 1})[0]
    assert take(last, "1", "2", "r_1_0") == ({"hop": 2}, 0)


def test_same_key_on_two_edges(make: Make) -> None:
    first, second = make(0), make(1)
    first.put("0", "1", "same", {"edge": "01"})
    first.put("0", "2", "same", {"edge": "02"})
    assert take(second, "0", "2", "same") == ({"edge": "02"}, 0)
    assert take(second, "0", "1", "same") == ({"edge": "01"}, 0)


def test_readers_take_it_each(make: Make) -> None:
    sender, receiver = make(0, readers=2), make(1)
    sender.put("0", "1", "r_0_0", {"x": np.arange(3)})
    for _ in range(2):
        result = take(receiver, "0", "1", "r_0_0")
        assert result is not None
        assert result[0]["x"].tolist() == [0, 1, 2]
    assert receiver.get("0", "1", "r_0_0") is None


def test_health_and_close(make: Make) -> None:
    sender = make(0)
    assert sender.health() == {"status": "healthy", "backend": "shared_memory", "edges": {}}
    sender.put("0", "1", "r_0_0", {"a": 1})
    health = sender.health()
    assert health["status"] == "healthy"
    assert health["edges"]["0->1 producer"]["puts"] == 1
    assert health["edges"]["0->1 producer"]["pending"] == 1
    sender.close()
    sender.close()
    assert sender.health()["edges"] == {}


def test_two_instances_of_a_stage_share_an_end_and_the_last_closes_it(make: Make) -> None:
    one, two, receiver = make(0), make(0), make(1)
    one.put("0", "1", "a", {"n": 1})
    two.put("0", "1", "b", {"n": 2})
    one.close()
    assert take(receiver, "0", "1", "a") == ({"n": 1}, 0)
    assert take(receiver, "0", "1", "b") == ({"n": 2}, 0)


@pytest.mark.parametrize(
    ("name", "extra", "error", "text"),
    [
        ("shared_memory", {"timeout": 3}, OptionError, "timeout_s"),
        ("shared_memory", {"timeout_s": "soon"}, OptionError, "timeout_s"),
        ("shared_memory", {"readers": 0}, OptionError, "readers"),
        ("memory", {}, ConfigError, "processes"),
        ("no_such_backend", {}, UnknownBackendError, "no_such_backend"),
    ],
)
def test_wrong_configuration_fails_at_start(
    make: Make, name: str, extra: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ConnectorAdapter(name, {"stage_id": 0, **extra})


def test_pipeline_options_stay_in_config_and_out_of_the_transport(make: Make) -> None:
    adapter = make(0, codec_chunk_frames=25, connector_get_sleep_s=0.01, mine=1, pipeline_options=["mine"])
    assert adapter.config["codec_chunk_frames"] == 25
    assert adapter.put("0", "1", "k", {"a": 1})[0]


def test_missing_sdk_says_what_to_install(make: Make) -> None:
    from omni_connector_core import BackendSpec, Capabilities, plugin_manager

    spec = BackendSpec(
        name="absent",
        summary="",
        transport="no_such_sdk_transport:Transport",
        options="omni_connector_core.options:Options",
        capabilities=Capabilities(),
        install="pip install absent-sdk",
        sdk="no_such_sdk_transport",
    )
    plugin_manager.register(spec)
    try:
        with pytest.raises(PluginError, match="pip install absent-sdk"):
            ConnectorAdapter("absent", {"stage_id": 0})
    finally:
        plugin_manager.unregister(spec)


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("SharedMemoryConnector", {"shm_threshold_bytes": 65536}, {}),
        (
            "MooncakeStoreConnector",
            {
                "master": "127.0.0.1:50051",
                "metadata_server": "http://127.0.0.1:8080/metadata",
                "host": "127.0.0.1",
                "segment": 64 << 20,
                "localbuf": 32 << 20,
                "proto": "tcp",
                "rdma": "",
            },
            {
                "master": "127.0.0.1:50051",
                "metadata_server": "http://127.0.0.1:8080/metadata",
                "host": "127.0.0.1",
                "capacity_bytes": 64 << 20,
                "arena_bytes": 32 << 20,
                "protocol": "tcp",
                "device_name": "",
            },
        ),
        (
            "MooncakeTransferEngineConnector",
            {
                "host": "127.0.0.1",
                "protocol": "tcp",
                "device_name": "",
                "memory_pool_size": 64 << 20,
                "memory_pool_device": "cpu",
                "buffer_ttl_seconds": 60,
                "sender_host": "127.0.0.1",
                "sender_zmq_port": 50051,
            },
            {
                "host": "127.0.0.1",
                "protocol": "tcp",
                "device_name": "",
                "capacity_bytes": 64 << 20,
                "memory_pool_device": "cpu",
                "ttl_s": 60,
            },
        ),
        (
            "YuanrongConnector",
            {"host": "127.0.0.1", "port": 31501, "get_sub_timeout_ms": 5},
            {"host": "127.0.0.1", "port": 31501},
        ),
        (
            "NixlConnector",
            {"host": "127.0.0.1", "backends": ["UCX"], "num_threads": 2},
            {"host": "127.0.0.1", "backends": ["UCX"]},
        ),
    ],
)
def test_each_built_in_name_and_its_options(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    monkeypatch.setenv(backends.DROP_IN_ENV, "1")
    spec = backends.backend_of(name)
    assert split_extra(spec, {"stage_id": 0, **theirs}, name=name).options == ours
    with pytest.raises(OptionError, match="did you mean"):
        split_extra(spec, {"timeout": 3}, name=name)
    # the end itself is not opened: it would load the SDK, and the vendors' libraries do not bear each other in one process
    assert parse_options(spec.load_options(), ours, backend=spec.name).ttl_s > 0


@pytest.mark.parametrize(
    ("name", "option", "stage"),
    [
        ("mooncake_te", "zmq_port", 2),
        ("mooncake_te", "control_port", 0),
        ("MooncakeTransferEngineConnector", "zmq_port", 0),  # for a name that it knows the engine has added the stage
    ],
)
def test_a_producer_is_where_the_engine_sends_its_consumers(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str, option: str, stage: int
) -> None:
    pytest.importorskip("mooncake")
    monkeypatch.setenv(backends.DROP_IN_ENV, "1")
    [port] = free_ports(1)
    sender = make(2, name, **{option: port - stage})
    assert sender.put("2", "3", "k", {"a": 1})[0]
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S):
        pass

# SPDX-License-Identifier: Apache-2.0
"""What the adapter relies on, held against the vllm-omni that is installed: a new version fails here first, and says where."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
import vllm_omni
import yaml
from vllm.plugins import DEFAULT_PLUGINS_GROUP
from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler
from vllm_omni.core.sched.omni_scheduler_mixin import OmniSchedulerMixin
from vllm_omni.core.sched.omni_scheduling_coordinator import OmniSchedulingCoordinator
from vllm_omni.distributed.omni_connectors import factory
from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
from vllm_omni.distributed.omni_connectors.kv_transfer_manager import OmniKVTransferManager
from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter
from vllm_omni.distributed.omni_connectors.utils import initialization
from vllm_omni.plugins import OMNI_DEFAULT_PLUGINS_GROUP
from vllm_omni.worker.omni_connector_model_runner_mixin import OmniConnectorModelRunnerMixin

from omni_connector_core import plugin_manager
from omni_connector_serve.vllm_omni.adapter import ConnectorAdapter
from omni_connector_serve.vllm_omni.backends import our_names
from omni_connector_serve.vllm_omni.extra import upstream_options
from omni_connector_serve.vllm_omni.plugin import register

TESTED_VERSIONS = {"0.30.0"}
SOURCES = Path(vllm_omni.__file__).parent
# Where the engine calls connectors, and the names under which it holds them.
CALLERS = [
    SOURCES / "distributed/omni_connectors" / name
    for name in (
        "kv_transfer_manager.py",
        "model_runner/omni_connector_payload_transport.py",
        "model_runner/omni_connector_runtime.py",
        "transfer_adapter/base.py",
        "transfer_adapter/chunk_transfer_adapter.py",
    )
] + [SOURCES / "diffusion/worker/stage_payload.py", SOURCES / "worker_v2/omni_data_plane.py"]
HOLDERS = {"connector", "_connector", "_omni_connector"}


def test_version_was_run() -> None:
    assert version("vllm-omni") in TESTED_VERSIONS


def parameters(function: object) -> list[tuple[str, inspect._ParameterKind]]:
    return [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "method", ["put", "get", "get_with_deadline", "abandon_get", "cleanup", "reap_consumed", "health", "close"]
)
def test_signatures(method: str) -> None:
    assert parameters(getattr(ConnectorAdapter, method)) == parameters(getattr(OmniConnectorBase, method))


def test_no_abstract_method_is_left() -> None:
    assert not ConnectorAdapter.__abstractmethods__


def attributes_used() -> Iterator[tuple[str, str]]:
    for caller in CALLERS:
        for node in ast.walk(ast.parse(caller.read_text())):
            if isinstance(node, ast.Attribute):
                holder = node.value
                name = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", None)
                if name in HOLDERS:
                    yield node.attr, f"{caller.name}:{node.lineno}"


def test_every_attribute_that_the_engine_uses_is_there() -> None:
    used = dict(attributes_used())
    assert {"put", "get", "get_with_deadline", "stage_id"} <= used.keys(), "the engine calls connectors elsewhere now"
    # Set on a connector only after its update_sender_info raised, which ours does not.
    used.pop("sender_host", None)
    used.pop("sender_zmq_port", None)
    there = set(dir(ConnectorAdapter)) | {"config", "stage_id"}
    assert {name: where for name, where in used.items() if name not in there} == {}


def test_factory() -> None:
    assert parameters(factory.OmniConnectorFactory.register_connector) == [
        ("name", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        ("constructor", inspect.Parameter.POSITIONAL_OR_KEYWORD),
    ]
    assert isinstance(factory.OmniConnectorFactory._registry, dict)
    assert issubclass(ConnectorAdapter, OmniConnectorBase)


def test_built_in_names() -> None:
    built_in = set(factory.OmniConnectorFactory.list_registered_connectors()) - our_names()
    assert built_in == upstream_options().built_in
    drop_ins = [plugin_manager.spec(name).drop_in for name in plugin_manager.names()]
    assert {drop_in.name for drop_in in drop_ins if drop_in is not None} <= built_in
    assert upstream_options().aliases.items() <= {("MooncakeConnector", "MooncakeStoreConnector")}
    assert upstream_options().aliases.keys() <= built_in


def test_abort_cleans_up_what_is_an_instance_of_the_built_in_class() -> None:
    source = (SOURCES / "distributed/omni_connectors/transfer_adapter/chunk_transfer_adapter.py").read_text()
    assert source.count("isinstance(self.connector, SharedMemoryConnector)") == 2
    register()
    assert issubclass(ConnectorAdapter, SharedMemoryConnector)


def test_the_wait_for_a_chunk_has_a_clock() -> None:
    source = inspect.getsource(OmniChunkTransferAdapter.collect_timed_out_request_ids)
    assert "in self._waiting_since.items() if now - started > timeout_s" in source
    assert "self.request_ids_mapping[req_id] = external_req_id" in inspect.getsource(OmniChunkTransferAdapter)


def test_a_worker_can_tell_the_scheduler_of_a_loss() -> None:
    coordinator = OmniSchedulingCoordinator(stage_id=1)
    assert parameters(coordinator.update_request_metadata)[:2] == [
        ("requests", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        ("request_metadata", inspect.Parameter.POSITIONAL_OR_KEYWORD),
    ]
    assert "self._waiting_since.items()" in inspect.getsource(coordinator.collect_timed_out_request_ids)
    source = inspect.getsource(OmniSchedulerMixin._process_pending_omni_inputs)
    heard, ended = ("self._consume_pending_connector_output(", "self._process_pending_input_timeouts(")
    assert 0 < source.index(heard) < source.index(ended)
    runner = inspect.getsource(OmniConnectorModelRunnerMixin.register_chunk_recv)
    assert "self._request_ids_mapping[request_id] = ext" in runner
    assert "dict(self._local_request_metadata)" in inspect.getsource(
        OmniConnectorModelRunnerMixin._drain_omni_connector_output
    )
    assert "self._synchronous_payload_transport = " in inspect.getsource(
        OmniConnectorModelRunnerMixin.init_omni_connectors
    )


def test_a_scheduler_can_tell_the_workers_which_requests_were_aborted() -> None:
    """Each before the other: the request ends, the output is made, the worker hears, it sends what has ended."""
    assert "finished = super().finish_requests(request_ids, finished_status)" in inspect.getsource(
        OmniSchedulerMixin.finish_requests
    )
    assert "return finished" in inspect.getsource(OmniSchedulerMixin.finish_requests)
    scheduler = inspect.getsource(OmniARScheduler.schedule)
    assert "return self._wrap_omni_scheduler_output(" in scheduler
    runner = (SOURCES / "worker/gpu_ar_model_runner.py").read_text()
    heard, sent = "self.recv_full_payload_inputs(scheduler_output)", "self.flush_full_payload_outputs(flush_ids)"
    assert 0 < runner.index(heard) < runner.index(sent)
    accumulate = inspect.getsource(OmniConnectorModelRunnerMixin.accumulate_full_payload_output)
    assert "self._pending_full_payload_send[req_id] = " in accumulate


def test_a_get_that_raises_ends_a_wait_inside_a_step() -> None:
    for wait in (
        OmniKVTransferManager.receive_kv_cache_for_request,
        OmniConnectorModelRunnerMixin.recv_stage_payload,
    ):
        source = inspect.getsource(wait)
        assert source.index(
            "self.connector.get(" if "self.connector.get(" in source else "connector.get_with_deadline("
        )
        assert "except Exception" in source


def test_a_stage_takes_its_kv_cache_by_two_methods() -> None:
    source = (SOURCES / "diffusion/worker/diffusion_model_runner.py").read_text()
    methods = set(re.findall(r"self\.kv_transfer_manager\.(\w*(?:receive|consume)\w*)\(", source))
    assert methods == {"receive_multi_kv_cache_distributed", "consume_and_distribute_kv_cache"}


def test_entry_points() -> None:
    assert (DEFAULT_PLUGINS_GROUP, OMNI_DEFAULT_PLUGINS_GROUP) == (
        "vllm.general_plugins",
        "vllm_omni.general_plugins",
    )
    for group in (DEFAULT_PLUGINS_GROUP, OMNI_DEFAULT_PLUGINS_GROUP):
        [point] = entry_points(group=group, name="omni_connector")
        assert callable(point.load())


@pytest.mark.parametrize(
    ("purpose", "rank", "replica", "port"),
    [
        ("request_forwarding", 0, 0, 50052),
        ("request_forwarding", 1, 2, 50052 + 16 + 2048),
        ("kv_transfer", 0, 0, 50152),
    ],
)
def test_ports(purpose: str, rank: int, replica: int, port: int) -> None:
    found = initialization.compute_connector_zmq_port(
        50051, purpose=purpose, from_stage=1, local_rank=rank, replica_id=replica
    )
    assert found == port


def python_sources() -> str:
    return "\n".join(path.read_text() for path in SOURCES.rglob("*.py"))


def test_option_tables() -> None:
    table, sources = upstream_options(), python_sources()
    assert [name for name in sorted(table.pipeline) if f'"{name}"' not in sources] == []
    assert [name for name in sorted(table.unread) if f'"{name}"' in sources] == []


def test_every_option_that_a_built_in_connector_reads_is_understood_with_drop_in() -> None:
    connectors = SOURCES / "distributed/omni_connectors/connectors"
    for spec in map(plugin_manager.spec, plugin_manager.names()):
        if spec.drop_in is not None:
            [source] = [
                text for path in connectors.glob("*.py") if f"class {spec.drop_in.name}(" in (text := path.read_text())
            ]
            read = set(re.findall(r"config\.get\(\s*[\"'](\w+)[\"']", source))
            assert read - spec.drop_in.options.keys() - upstream_options().engine == set(), spec.drop_in.name


def test_upstreams_own_deploy_files_use_known_options() -> None:
    table = upstream_options()
    strangers = {}
    for path in sorted((SOURCES / "deploy").glob("*.yaml")):
        for name, connector in (yaml.safe_load(path.read_text()).get("connectors") or {}).items():
            if connector.get("name") in (None, "SharedMemoryConnector"):
                unknown = set(connector.get("extra") or {}) - table.pipeline - table.unread
                if unknown:
                    strangers[f"{path.name}:{name}"] = unknown
    assert strangers == {}

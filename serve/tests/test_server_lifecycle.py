"""A server from its first second to its last: starting, draining, being killed; replicas and ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
from serving_process import CONNECTOR, DEADLINE_S, alive, eventually, pipeline_of, runtime_folder, served, start


def test_health_names_the_stage_that_is_missing_and_requests_are_refused(tmp_path: Path) -> None:
    stages = {"slow": {"options": {"held": True}}}
    server = start(pipeline_of("quick", "slow", folder=tmp_path, stages=stages), tmp_path)
    try:
        eventually(lambda: server.stage("quick")["state"], lambda state: state == "ready")
        health = server.health()
        assert health.status_code == 503
        assert health.json()["reason"] == "stage 'slow' is starting: its processes are starting"
        refused = server.generate()
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "UnavailableError"
        server.open("start")
        server.healthy()
        assert server.generate("x").json()["outputs"] == {"text": "x>quick>slow"}
        assert server.close().splitlines()[0] == "ready"
    finally:
        server.process.kill()
        server.process.wait()


def test_a_stage_that_cannot_be_set_up_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "only.broken").touch()
    pipeline = pipeline_of("only", folder=tmp_path, serve={"connector": {"type": CONNECTOR}})
    del pipeline["connector"], pipeline["edges"]
    server = start(pipeline, tmp_path)
    try:
        reason = eventually(lambda: server.health().json().get("reason", ""), lambda reason: "RuntimeError" in reason)
        assert reason == "stage 'only' is restarting: setup: RuntimeError: it was told to be broken"
        assert server.generate().status_code == 503
        (tmp_path / "only.broken").unlink()
        server.healthy()
        assert server.generate("x").json()["outputs"] == {"text": "x>only"}
        server.close()
    finally:
        server.process.kill()
        server.process.wait()


def test_sigterm_lets_running_requests_end_and_takes_no_new_ones(tmp_path: Path) -> None:
    with served(pipeline_of("a", "b", folder=tmp_path), tmp_path) as server:
        workers = server.workers()
        running = server.start("last", params={"b": {"enter": "in", "await": "go"}})
        server.entered("in")
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: _refuses(server.url))
        server.open("go")
        assert running.result().json()["outputs"] == {"text": "last>a>b"}
        server.process.wait(DEADLINE_S)
        assert not any(map(alive, workers))
        assert not list(runtime_folder(tmp_path).iterdir())


def test_more_requests_than_are_taken_are_told_to_come_again(tmp_path: Path) -> None:
    with served(pipeline_of("a", "b", folder=tmp_path, serve={"max_requests": 2}), tmp_path) as server:
        taken = [server.start(params={"a": {"enter": f"in{n}", "await": "go"}}) for n in range(2)]
        eventually(lambda: server.metric("omni_serve_requests_running"), lambda running: running == 2)
        busy = server.generate()
        assert (busy.status_code, busy.json()["error"]["type"]) == (429, "BusyError")
        server.open("go")
        assert [answer.result().status_code for answer in taken] == [200, 200]
        assert server.generate().status_code == 200


def test_what_does_not_end_within_the_drain_is_ended(tmp_path: Path) -> None:
    with served(
        pipeline_of("a", folder=tmp_path, serve={"drain_s": 1, "connector": {"type": CONNECTOR}}), tmp_path
    ) as server:
        workers = server.workers()
        running = server.start(params={"a": {"enter": "in", "await": "never"}})
        server.entered("in")
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(DEADLINE_S)
        assert running.exception() or running.result().status_code >= 500
        assert not any(map(alive, workers))


def test_a_killed_server_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    server = start(pipeline_of("a", "b", folder=tmp_path), tmp_path)
    server.healthy()
    running = server.start(params={"b": {"enter": "in", "await": "never"}})
    server.entered("in")
    workers = server.workers()
    assert len(workers) == 2
    server.process.kill()
    server.process.wait()
    eventually(lambda: not any(map(alive, workers)))
    eventually(lambda: not list(runtime_folder(tmp_path).glob("omni-serve-*")))
    with pytest.raises(httpx.TransportError):
        running.result()


def test_replicas_work_side_by_side_and_stand_in_for_each_other(tmp_path: Path) -> None:
    stages = {"first": {"num_replicas": 2}, "second": {"num_replicas": 2}}
    with served(pipeline_of("first", "second", folder=tmp_path, stages=stages), tmp_path) as server:
        both = [server.start(f"r{n}", params={"second": {"enter": f"in{n}", "await": "go"}}) for n in range(2)]
        server.entered("in0")
        server.entered("in1")
        server.open("go")
        assert [answer.result().json()["outputs"]["text"] for answer in both] == ["r0>first>second", "r1>first>second"]
        os.kill(*server.stage("first", replica=0)["pids"], signal.SIGKILL)
        for number in range(4):
            assert server.generate(f"s{number}").json()["outputs"] == {"text": f"s{number}>first>second"}
        server.at_rest()


def test_ranks_work_together_and_are_restarted_together(tmp_path: Path) -> None:
    stages = {"wide": {"class": "acting_stages:TwoRanks", "tensor_parallel_size": 2}}
    with served(pipeline_of("first", "wide", "last", folder=tmp_path, stages=stages), tmp_path) as server:
        assert server.generate("x").json()["outputs"] == {"text": "x>first>2 ranks>last"}
        pids = server.stage("wide")["pids"]
        assert len(pids) == 2
        failed = server.generate(params={"wide": {"rank": 1, "raise": "one of two"}})
        assert failed.json()["error"]["cause"] == "ValueError: one of two"
        eventually(lambda: not any(map(alive, pids)))
        server.healthy()
        refused = server.generate(params={"wide": {"rank": 1, "refuse": "one of two"}})
        assert refused.status_code == 400
        os.kill(server.stage("wide")["pids"][1], signal.SIGKILL)
        eventually(lambda: server.stage("wide")["restarts"], lambda restarts: restarts == 2)
        server.healthy()
        assert server.generate("y").json()["outputs"] == {"text": "y>first>2 ranks>last"}
        server.at_rest()


def _refuses(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 503
    except httpx.ConnectError:
        return True

"""A stage that raises, dies or hangs ends the requests that are in it, no other, and is there again afterwards."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving_process import Server, alive, events, eventually, pipeline_of, served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("acting")
    stages = {"middle": {"timeout_s": 20}, "short": {"timeout_s": 0.5}}
    with served(pipeline_of("first", "middle", "short", folder=folder, stages=stages), folder) as server:
        yield server


@pytest.fixture(autouse=True)
def whole(server: Server) -> Any:
    """Every test begins and ends with a server that works and holds nothing."""
    server.healthy()
    yield
    server.healthy()
    assert server.generate("after").json()["outputs"] == {"text": "after>first>middle>short"}
    server.at_rest()


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_a_request_passes_all_stages(server: Server) -> None:
    answer = server.generate("hello").json()
    assert answer["outputs"] == {"text": "hello>first>middle>short"}
    assert set(answer["stages"]) == {"first", "middle", "short"}


@pytest.mark.parametrize("stage", ["first", "middle", "short"])
def test_an_exception_ends_its_request_and_names_stage_and_cause(server: Server, stage: str) -> None:
    restarts = server.stage(stage)["restarts"]
    error = error_of(server.generate(params={stage: {"raise": "no such luck"}}), 500)
    assert (error["type"], error["stage"], error["cause"]) == ("StageFailedError", stage, "ValueError: no such luck")
    eventually(lambda: server.stage(stage)["restarts"], lambda count: count == restarts + 1)


def test_a_refusal_is_the_clients_fault_and_restarts_nothing(server: Server) -> None:
    pids = server.workers()
    error = error_of(server.generate(params={"middle": {"refuse": "not today"}}), 400)
    assert error["message"] == "stage 'middle' refused the request: not today"
    assert server.workers() == pids


@pytest.mark.parametrize("count", [{}, {"count": 1}], ids=["whole", "streamed"])
def test_what_is_no_number_is_null(server: Server, count: dict[str, int]) -> None:
    response = server.generate(params={"short": {"give": "no numbers", **count}}, stream=bool(count))
    outputs = dict(events(response))["chunk"] if count else response.json()["outputs"]
    outputs.pop("text")
    assert outputs == {"scores": [[1.5, None], [None, 2.0]], "loss": None, "deep": [{"x": [None, 1]}]}


def test_what_has_no_form_in_json_is_an_error_that_says_where(server: Server) -> None:
    pids = server.workers()
    error = error_of(server.generate(params={"short": {"give": "complex numbers"}}), 500)
    assert error["type"] == "OutputError"
    assert error["message"].startswith("outputs['spectrum']['left'] is a complex")
    response = server.generate(params={"short": {"give": "complex numbers", "count": 2}}, stream=True)
    assert dict(events(response))["error"]["type"] == "OutputError"
    assert server.workers() == pids


def test_a_kill_ends_the_request_in_the_stage_and_no_other(server: Server) -> None:
    inside = server.start("a", params={"middle": {"enter": "k1", "await": "never"}})
    server.entered("k1")
    behind = server.start("b")
    eventually(lambda: server.stage("middle")["waiting"], lambda waiting: waiting == 1)
    before = server.start("c", params={"first": {"enter": "k2", "await": "k2.go"}})
    server.entered("k2")
    [pid] = server.stage("middle")["pids"]
    os.kill(pid, signal.SIGKILL)
    error = error_of(inside.result(), 500)
    assert (error["stage"], error["cause"]) == ("middle", f"its process {pid} (rank 0) was killed by SIGKILL")
    assert behind.result().json()["outputs"] == {"text": "b>first>middle>short"}
    server.open("k2.go")
    assert before.result().json()["outputs"] == {"text": "c>first>middle>short"}


def test_a_request_whose_input_died_with_its_maker_starts_again(server: Server) -> None:
    inside = server.start("a", params={"middle": {"enter": "r1", "await": "r1.go"}})
    server.entered("r1")
    behind = server.start("b")
    eventually(lambda: server.stage("middle")["waiting"], lambda waiting: waiting == 1)
    [pid] = server.stage("first")["pids"]
    os.kill(pid, signal.SIGKILL)  # `first` is through with both; what it made for b lies there unread
    eventually(lambda: server.stage("first")["restarts"] and server.stage("first")["state"], lambda s: s == "ready")
    server.open("r1.go")
    assert inside.result().json()["outputs"] == {"text": "a>first>middle>short"}
    assert behind.result().json()["outputs"] == {"text": "b>first>middle>short"}


def test_an_exit_is_reported_with_its_code(server: Server) -> None:
    error = error_of(server.generate(params={"middle": {"exit": 7}}), 500)
    assert error["stage"] == "middle"
    assert error["cause"].endswith("(rank 0) exited with code 7")


def test_a_stage_that_hangs_is_ended_by_its_timeout(server: Server) -> None:
    [pid] = server.stage("short")["pids"]
    error = error_of(server.generate(params={"short": {"await": "never"}}), 504)
    assert (error["type"], error["stage"]) == ("StageTimeoutError", "short")
    assert error["cause"] == "not done after its timeout_s of 0.5 s"
    eventually(lambda: alive(pid), lambda living: not living)


def test_a_stopped_process_is_ended_by_the_timeout(server: Server) -> None:
    [pid] = server.stage("short")["pids"]
    os.kill(pid, signal.SIGSTOP)
    assert error_of(server.generate(), 504)["stage"] == "short"
    eventually(lambda: alive(pid), lambda living: not living)


def test_a_request_has_a_deadline_of_its_own(server: Server) -> None:
    pids = server.workers()
    error = error_of(server.generate(timeout_s=0.3, params={"middle": {"enter": "d1", "await": "d1.go"}}), 504)
    assert (error["type"], error["message"]) == ("RequestTimeoutError", "not done after 0.3 s; it was in 'middle'")
    server.open("d1.go")  # what the stage then makes goes nowhere
    server.at_rest()
    assert server.workers() == pids


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(server: Server, stream: bool) -> None:
    cancelled = server.metric("omni_serve_requests_total", outcome="cancelled")
    params = {"middle": {"enter": f"c{stream}", "await": f"c{stream}.go"}}
    with httpx.Client(base_url=server.url, timeout=0.5) as impatient, pytest.raises(httpx.ReadTimeout):
        impatient.post("/v1/generate", json={"text": "x", "stream": stream, "params": params})
    eventually(lambda: server.metric("omni_serve_requests_running"), lambda running: running == 0)
    server.open(f"c{stream}.go")
    assert server.metric("omni_serve_requests_total", outcome="cancelled") == cancelled + 1


def test_a_stream_without_a_chunk_is_a_stream(server: Server) -> None:
    body = {"text": "x", "stream": True, "params": {"short": {"count": 0}}}
    with server.client.stream("POST", "/v1/generate", json=body) as response:
        assert [name for name, _ in events(response)] == ["done"]


def test_a_client_that_leaves_a_stream_closes_it_at_its_source(server: Server) -> None:
    params = {"short": {"count": 1000, "closed": "l1.closed"}}
    with server.client.stream("POST", "/v1/generate", json={"text": "x", "stream": True, "params": params}) as response:
        assert next(events(response))[0] == "chunk"
    server.entered("l1.closed")


def test_a_stream_that_breaks_says_so_after_what_came(server: Server) -> None:
    params = {"short": {"count": 3, "await": "b1.go", "raise": "halfway"}}
    with server.client.stream("POST", "/v1/generate", json={"text": "x", "stream": True, "params": params}) as response:
        received = events(response)
        assert next(received) == ("chunk", {"text": "x>first>middle>short.0"})
        server.open("b1.go")
        [(event, error)] = received
    assert event == "error"
    assert (error["stage"], error["cause"]) == ("short", "ValueError: halfway")


def test_a_producer_that_dies_within_a_stream_is_to_blame_and_not_its_consumer(server: Server) -> None:
    restarts = server.stage("short")["restarts"]
    running = server.start(params={"middle": {"count": 3, "enter": "s1", "await": "never"}})
    server.entered("s1")
    eventually(lambda: server.stage("short")["request_id"])
    [pid] = server.stage("middle")["pids"]
    os.kill(pid, signal.SIGKILL)
    assert error_of(running.result(), 500)["stage"] == "middle"
    assert server.stage("short")["restarts"] == restarts


def test_nothing_is_left_of_a_dozen_failures(server: Server) -> None:
    fds = Path(f"/proc/{server.process.pid}/fd")
    ways: list[dict[str, Any]] = [{"raise": "x"}, {"refuse": "x"}, {"exit": 1}, {"count": 3, "raise": "x"}]

    def fail_once(way: dict[str, Any]) -> None:
        assert server.generate(params={"middle": way}).status_code in (400, 500)
        server.healthy()

    for way in ways:
        fail_once(way)
    server.at_rest()
    before = len(list(fds.iterdir())), len(server.workers())
    for _ in range(3):
        for way in ways:
            fail_once(way)
    server.at_rest()
    eventually(lambda: (len(list(fds.iterdir())), len(server.workers())), lambda now: now <= before, within_s=10)

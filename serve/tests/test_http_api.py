"""The reference pipeline behind HTTP: right answers, streams, and bad requests."""

from __future__ import annotations

import base64
import importlib.resources
import io
import json
import socket
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
import zmq
from PIL import Image
from serving_process import CONNECTOR, Server, events, served, total

from omni_connector_serve.reference.single import Generated, generate

FILES = importlib.resources.files("omni_connector_serve.reference")
PNG = (FILES / "demo.png").read_bytes()
TEXT = "rain on a tin roof"
BODY = {"text": TEXT, "media": {"image": base64.b64encode(PNG).decode()}, "params": {"max_tokens": 20, "seed": 5}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("reference")
    pipeline = yaml.safe_load((FILES / "pipeline.yaml").read_text())
    pipeline["connector"]["type"] = CONNECTOR
    pipeline["serve"]["max_body_bytes"] = 200_000
    with served(pipeline, folder) as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> Generated:
    torch.set_num_threads(1)
    return generate(PNG, TEXT, max_tokens=20, seed=5)


@pytest.fixture(autouse=True)
def nothing_held(server: Server) -> Iterator[None]:
    yield
    server.at_rest()
    assert all(server.stage(name)["restarts"] == 0 for name in ("encode", "prefill", "decode", "generate"))


def check(outputs: dict[str, Any], expected: Generated) -> None:
    with wave.open(io.BytesIO(base64.b64decode(outputs["audio"]["data"]))) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (24_000, 1, 2)
        assert sound.readframes(sound.getnframes()) == expected.samples.numpy().tobytes()
    picture = Image.open(io.BytesIO(base64.b64decode(outputs["image"]["data"])))
    assert picture.tobytes() == expected.picture.numpy().tobytes()
    assert outputs["tokens"] == expected.tokens


def test_the_answer_is_that_of_one_process_bit_for_bit(server: Server, expected: Generated) -> None:
    answer = server.client.post("/v1/generate", json=BODY).json()
    check(answer["outputs"], expected)
    prompt = 36 + len(TEXT)
    assert answer["outputs"]["usage"] == {"prompt_positions": prompt, "decode_positions": 19}
    assert set(answer["stages"]) == {"encode", "prefill", "decode", "generate"}
    assert 0 < answer["first_chunk_s"] < answer["total_s"]


def test_the_bytes_cross_the_connector(server: Server) -> None:
    def counters() -> dict[str, tuple[float, float, float]]:
        edges = ("request->encode", "encode->prefill", "prefill->decode", "decode->generate", "generate->response")
        names = ("omni_connector_puts_total", "omni_connector_put_bytes_total", "omni_connector_get_bytes_total")
        samples = server.samples()
        return {edge: tuple(total(samples, name, edge=edge, backend=CONNECTOR) for name in names) for edge in edges}

    before = counters()
    server.client.post("/v1/generate", json=BODY)
    puts, put_bytes, got_bytes = (
        {edge: after[index] - before[edge][index] for edge, after in counters().items()} for index in range(3)
    )
    positions, tokens, layers = 36 + len(TEXT), 20, 4
    assert puts["request->encode"] == 1
    assert put_bytes["request->encode"] > len(PNG)
    assert put_bytes["encode->prefill"] > 36 * 128 * 4
    assert got_bytes["encode->prefill"] == 2 * put_bytes["encode->prefill"]  # both ranks of prefill read it
    assert puts["prefill->decode"] >= 2 * layers
    assert put_bytes["prefill->decode"] > layers * 2 * positions * 4 * 16 * 4
    assert put_bytes["decode->generate"] > tokens * 128 * 4
    assert put_bytes["generate->response"] > tokens * 480 * 2


def test_a_form_gives_the_same_as_json(server: Server, expected: Generated) -> None:
    form = {"text": TEXT, "params": json.dumps(BODY["params"])}
    answer = server.client.post("/v1/generate", data=form, files={"image": ("a.png", PNG, "image/png")})
    check(answer.json()["outputs"], expected)


def test_sound_streams_before_the_last_token_exists(server: Server) -> None:
    body = {**BODY, "params": {"max_tokens": 512}, "stream": True}
    with server.client.stream("POST", "/v1/generate", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        received = events(response)
        event, first = next(received)
        decoding = server.stage("decode")["request_id"]
        rest = list(received)
    assert event == "chunk"
    assert first["audio"]["media_type"] == "audio/pcm"
    assert decoding is not None
    assert len(base64.b64decode(first["audio"]["data"])) == 8 * 480 * 2
    assert [name for name, _ in rest] == ["chunk"] * (512 // 8) + ["done"]
    assert rest[-1][1]["chunks"] == 512 // 8 + 1


def test_requests_of_several_clients_do_not_mix(server: Server) -> None:
    def ask(seed: int) -> list[int]:
        body = {"text": f"voice {seed}", "params": {"max_tokens": 6, "seed": seed}}
        return server.client.post("/v1/generate", json=body).json()["outputs"]["tokens"]

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(ask, range(6)))
    assert answers == [generate(None, f"voice {seed}", max_tokens=6, seed=seed).tokens for seed in range(6)]


def test_stages_and_health_describe_what_runs(server: Server) -> None:
    described = server.client.get("/v1/stages").json()
    assert described["pipeline"] == "reference"
    assert [stage["stage"] for stage in described["stages"]] == ["encode", "prefill", "decode", "generate"]
    pids = [pid for stage in described["stages"] for pid in stage["replicas"][0]["pids"]]
    assert set(pids) == server.workers()
    assert len(pids) == 5
    assert {"edge": "prefill->decode", "connector": CONNECTOR} in described["edges"]
    assert server.health().json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "the body is not a request: Input data was truncated"),
        (b"[]", 400, "Expected `object`, got `array`"),
        (b'{"text": 1}', 400, "Expected `str`, got `int` - at `$.text`"),
        (b'{"txt": "a"}', 400, "Object contains unknown field `txt`"),
        (b'{"text": "\xff"}', 400, "Invalid UTF-8"),
        (b"[" * 100_000, 400, "the body is not a request"),
        (b'{"media": {"image": "!"}}', 400, "media.image is not base64"),
        (b'{"media": {"image": "AAAA"}}', 400, "the image cannot be read"),
        (b'{"media": {"movie": "AAAA"}}', 400, "media.movie is unknown; known is image"),
        (b'{"text": "a", "params": {"max_tokens": 0}}', 400, "params.max_tokens is from 1 to 512, not 0"),
        (b'{"text": "a", "params": {"seed": "x"}}', 400, "params.seed is an integer"),
        (b'{"text": "a", "params": {"tempo": 1}}', 400, "params.tempo is unknown; known are max_tokens, seed"),
        (b'{"text": ""}', 400, "text and image make 0 positions"),
        (b'{"text": "' + b"a" * 3000 + b'"}', 400, "text and image make 3000 positions"),
        (b'{"text": "a", "timeout_s": 0}', 400, "timeout_s is a number above 0"),
        (b'{"text": "' + b"a" * 200_000 + b'"}', 413, "larger than the 200,000 bytes"),
    ],
)
def test_a_bad_request_is_told_what_is_bad(server: Server, body: bytes, status: int, message: str) -> None:
    response = server.client.post("/v1/generate", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


def test_a_body_of_another_type_is_refused(server: Server) -> None:
    assert server.client.post("/v1/generate", content=b"x").status_code == 415
    response = server.client.post("/v1/generate", content=b"x", headers={"content-type": "multipart/form-data"})
    assert response.status_code == 400
    twice = server.client.post("/v1/generate", files=[("image", PNG), ("image", PNG)])
    assert twice.json()["error"]["message"] == "the form has 'image' twice"


def test_unknown_paths_and_methods_are_refused_in_the_same_form(server: Server) -> None:
    assert server.client.get("/v2").json() == {"error": {"type": "HTTPException", "message": "Not Found"}}
    assert server.client.get("/v1/generate").status_code == 405


def test_a_client_that_is_cut_off_in_the_middle_of_its_body_harms_nobody(server: Server, expected: Generated) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(
            b"POST /v1/generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
    check(server.client.post("/v1/generate", json=BODY).json()["outputs"], expected)


def test_random_bytes_on_the_control_sockets_harm_nobody(server: Server, expected: Generated) -> None:
    [reports] = (server.folder / "run").glob("omni-serve-*/reports")
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(f"ipc://{reports}")
        for junk in (b"", b"\xff" * 100, b"\x81\xa4type\xa4Done", Path(__file__).read_bytes()):
            push.send(junk)
    check(server.client.post("/v1/generate", json=BODY).json()["outputs"], expected)

"""The command line: what it prints, how it fails, and what it does not import."""

from __future__ import annotations

import importlib.resources
import io
import json
import os
import signal
import socket
import subprocess
import sys
import wave
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from serving_process import DEADLINE_S, alive

from omni_connector_core import plugin_manager
from omni_connector_serve.cli.demo import show

COMMAND = [sys.executable, "-m", "omni_connector_serve"]


def run(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, cwd=cwd, env={**os.environ, **env})


def third_party(folder: Path, name: str, source: str) -> str:
    """Install a plugin package as pip would, but in a folder of its own; returns the folder."""
    (folder / f"{name}_plugin.py").write_text(source)
    info = folder / f"{name}_plugin-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text(f"[omni_connector]\n{name} = {name}_plugin\n")
    return str(folder)


def test_backends_lists_what_is_installed() -> None:
    printed = json.loads(run("backends", "--json").stdout)
    assert printed["codec"] == "compiled"
    assert json.loads(run("backends", "--json", OMNI_CONNECTOR_PURE_PYTHON="1").stdout)["codec"] == "python"
    listed = printed["backends"]
    rows = {row["name"]: row for row in listed}
    assert list(rows) == plugin_manager.names()
    own = rows["shared_memory"]
    assert own["sdk"] is None
    assert own["sdk_present"] is True
    assert own["service"] is False
    assert own["capabilities"]["cross_process"] is True
    assert own["capabilities"]["cross_host"] is False
    assert own["version"]
    assert "shared_memory" in run("backends").stdout


def test_backends_shows_a_missing_sdk_and_a_broken_plugin_beside_the_good_ones(tmp_path: Path) -> None:
    path = third_party(tmp_path, "broken", "import nothing_of_this_name\n")
    third_party(
        tmp_path,
        "bare",
        "from omni_connector_core import BackendSpec, Capabilities, hookimpl\n"
        "@hookimpl\n"
        "def omni_connector_backend():\n"
        "    return BackendSpec(name='bare', summary='Needs a vendor', transport='x:Y', options='x:Z', sdk='no_such_sdk',\n"
        "                       capabilities=Capabilities(), install='pip install no-such-sdk')\n",
    )
    rows = {row["name"]: row for row in json.loads(run("backends", "--json", PYTHONPATH=path).stdout)["backends"]}
    assert "nothing_of_this_name" in rows["broken"]["error"]
    assert (rows["bare"]["sdk_present"], rows["bare"]["version"]) == (False, "2.5")
    assert "error" not in rows["shared_memory"]
    shown = run("backends", PYTHONPATH=path, COLUMNS="200").stdout
    assert "missing: pip install no-such-sdk" in shown


@pytest.mark.parametrize("arguments", [["backends", "--json"], ["--help"], ["check", "nowhere.yaml"]])
def test_light_commands_import_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from omni_connector_serve.cli import main\n"
        f"sys.argv = ['omni-connector', *{arguments!r}]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'vllm', 'mooncake', 'yr.datasystem', 'nixl'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "heavy: []", done


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "nowhere.yaml"], "nowhere.yaml"),
        (["demo", "--connector", "carrier_pigeon"], "no backend 'carrier_pigeon' is installed"),
        (["demo", "--connector", "memory"], "memory stays within one process"),
        (["services", "up", "carrier_pigeon"], "no backend 'carrier_pigeon' is installed"),
        (["demo", "--image", "nowhere.png"], "nowhere.png"),
    ],
)
def test_a_failure_is_a_line_on_stderr(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_said_so(tmp_path: Path) -> None:
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text((importlib.resources.files("omni_connector_serve.reference") / "pipeline.yaml").read_text())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", str(pipeline), "--port", str(port))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}")


def test_new_writes_a_package_and_touches_nothing_that_is_there(tmp_path: Path) -> None:
    done = run("new", "pigeon_post", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "omni-connector-pigeon-post" / "pyproject.toml").exists()
    assert "--connector pigeon_post" in done.stdout
    again = run("new", "pigeon_post", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (1, "error: omni-connector-pigeon-post is not empty\n")
    assert run("new", "Pigeon Post", cwd=tmp_path).stderr.startswith("error: a backend's name is small letters")


def test_check_of_a_missing_file_is_a_fault() -> None:
    done = run("check", "nowhere.yaml")
    assert done.returncode == 1
    assert done.stdout.startswith("nowhere.yaml")


def test_a_backend_without_daemons_says_so() -> None:
    done = run("services", "up", "shared_memory")
    assert (done.returncode, done.stdout) == (0, "shared_memory needs no service\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_services_run_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    path = third_party(
        tmp_path,
        "daemonic",
        "from omni_connector_core import BackendSpec, Capabilities, hookimpl\n"
        "from omni_connector_core.services import DaemonSpec, Service\n"
        "def start(*, master='127.0.0.1:1'):\n"
        "    service = Service('daemonic').offer(master=master)\n"
        "    service.launch(DaemonSpec(name='sleeper', argv=['sleep', '1000'], ready=lambda: True))\n"
        "    return service\n"
        "@hookimpl\n"
        "def omni_connector_backend():\n"
        "    return BackendSpec(name='daemonic', summary='', transport='x:Y', options='x:Z', capabilities=Capabilities(),\n"
        "                       install='', service='daemonic_plugin:start')\n",
    )
    env = {**os.environ, "PYTHONPATH": path}
    command = [*COMMAND, "services", "up", "daemonic", "--set", "master=127.0.0.1:2", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    described = json.loads(process.stdout.readline())
    assert described["config"] == {"master": "127.0.0.1:2"}
    pid = described["daemons"]["sleeper"]["pid"]
    assert alive(pid)
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == 0
    assert not alive(pid)
    assert not Path(described["directory"]).exists()


def test_a_stage_in_the_current_folder_is_found_by_the_script_too(tmp_path: Path) -> None:
    (tmp_path / "my_own_stages.py").write_text("class Stage: ...\n")
    (tmp_path / "pipeline.yaml").write_text(
        "connector: {type: shared_memory}\nedges: [{from: a, to: b}]\n"
        "stages:\n  - {stage_id: a, class: 'my_own_stages:Stage'}\n  - {stage_id: b, class: 'my_own_stages:Stage'}\n"
    )
    command = [sys.executable, "-P", *COMMAND[1:], "check", "pipeline.yaml"]  # -P: the path of a script
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (0, "pipeline.yaml: ok\n"), done.stdout


def test_the_demo_gives_what_one_process_gives(tmp_path: Path) -> None:
    done = run("demo", "--json", "--max-tokens", "24", "--requests", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["connector"] == "shared_memory"
    assert report["stages"] == ["encode", "prefill", "decode", "generate"]
    assert report["requests"] == 2
    assert report["matches_single_process"] is True
    edges = {edge["edge"]: edge for edge in report["edges"]}
    assert all(edge["connector"] == "shared_memory" and edge["bytes"] > 0 for edge in edges.values())
    assert edges["prefill->decode"]["payloads"] >= 8
    assert 0 < report["first_chunk_s"] < report["total_s"]
    with wave.open(str(tmp_path / report["files"]["wav"])) as sound:
        assert sound.getnframes() == 24 * 480
    assert Image.open(tmp_path / report["files"]["png"]).size == (80, 80)
    console = Console(file=io.StringIO(), width=80)
    show(console, report)
    told = console.file.getvalue()
    for wanted in (*edges, "equal, bit for bit", "sound.wav", "First chunk", "Next:"):
        assert wanted in told
    assert "…" not in told

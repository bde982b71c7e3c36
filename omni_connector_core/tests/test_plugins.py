"""Finding backends: by entry points, one at a time, in every process, whatever is wrong with the others."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap

import pytest

from omni_connector_core import (
    BackendSpec,
    Capabilities,
    PluginError,
    UnknownBackendError,
    create_connector,
    hookimpl,
)
from omni_connector_core.memory.transport import MemoryTransport
from omni_connector_core.plugins import PluginManager

PLUGIN = """
from omni_connector_core import BackendSpec, Capabilities, hookimpl
@hookimpl
def omni_connector_backend():
    return BackendSpec(name="{name}", summary="A test", transport="omni_connector_core.memory.transport:MemoryTransport",
        options="omni_connector_core.memory.transport:MemoryOptions", capabilities=Capabilities(cross_process=False),
        install="pip install {name}")
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution with a plugin: metadata and a module in a folder on the path."""

    def install(name, module, source, *, dist=None):
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{(dist or name).replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist or name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[omni_connector]\n{name} = {module}\n")

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    yield install
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def python(code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_installed_backend_is_found_and_used(install):
    install("some_backend", "some_plugin", PLUGIN.format(name="some_backend"))
    manager = PluginManager()
    assert {"memory", "some_backend"} <= set(manager.names())
    with create_connector("some_backend", plugins=manager) as conn:
        conn.put("k", 1)
        assert conn.get("k") == 1
        assert conn.backend == "some_backend"


def test_listing_imports_no_backend(install):
    install("some_backend", "some_plugin", "raise RuntimeError('imported')")
    assert (
        python(
            """
        import sys
        from omni_connector_core import plugin_manager
        assert "some_backend" in plugin_manager.names()
        plugin_manager.spec("memory")
        print(sorted({"some_plugin", "omni_connector_core.memory.transport", "torch"} & set(sys.modules)))
        """
        )
        == "[]"
    )


def test_a_broken_plugin_hides_no_good_one_and_shows_its_own_traceback(install):
    install("broken", "broken_plugin", "import no_such_module_anywhere\n")
    install("good", "good_plugin", PLUGIN.format(name="good"))
    manager = PluginManager()
    assert manager.spec("good").name == "good"
    with pytest.raises(PluginError, match=r"broken_plugin of broken fails to import: ModuleNotFoundError") as caught:
        manager.spec("broken")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert "no_such_module_anywhere" in str(caught.value)


@pytest.mark.parametrize(
    "source",
    ["", "omni_connector_backend = 3", PLUGIN.format(name="another")],
    ids=["empty", "no hook", "another name"],
)
def test_a_plugin_that_describes_something_else_is_an_error(install, source):
    install("some_backend", "odd_plugin", source)
    with pytest.raises(PluginError, match="no omni_connector_backend"):
        PluginManager().spec("some_backend")


def test_two_packages_with_one_name_are_an_error_that_names_both(install):
    install("twin", "twin_one", PLUGIN.format(name="twin"), dist="first-package")
    install("twin", "twin_two", PLUGIN.format(name="twin"), dist="second-package")
    with pytest.raises(PluginError, match=r"first-package \(twin_one\) and second-package \(twin_two\)"):
        PluginManager().spec("twin")


def test_an_unknown_backend_lists_what_is_there_and_the_command():
    with pytest.raises(UnknownBackendError) as caught:
        create_connector("memmory")
    message = str(caught.value)
    assert "did you mean 'memory'" in message
    assert "Installed: " in message
    assert "pip install omni-connector-memmory" in message
    assert isinstance(caught.value, ValueError)


def use_in_child(name, queue):
    with create_connector(name) as conn:
        conn.put("k", "from the child")
        queue.put(conn.get("k"))


def test_a_backend_is_found_in_a_spawned_child(install):
    install("some_backend", "some_plugin", PLUGIN.format(name="some_backend"))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=use_in_child, args=("some_backend", queue))
    child.start()
    assert queue.get(timeout=60) == "from the child"
    child.join(60)
    assert child.exitcode == 0
    queue.close()


def spec(**changes):
    fields = {
        "name": "mine",
        "summary": "A test",
        "transport": "omni_connector_core.memory.transport:MemoryTransport",
        "options": "omni_connector_core.memory.transport:MemoryOptions",
        "capabilities": Capabilities(cross_process=False),
        "install": "pip install mine",
    }
    return BackendSpec(**{**fields, **changes})


def test_a_backend_can_be_brought_by_hand_and_taken_back():
    manager = PluginManager()
    mine = spec()
    manager.register(mine)
    assert "mine" in manager.names()
    with create_connector("mine", plugins=manager) as conn:
        conn.put("k", 1)
    manager.unregister(mine)
    assert "mine" not in manager.names()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"transport": "no_such_sdk_at_all:T", "sdk": "no_such_sdk_at_all"},
            "its SDK 'no_such_sdk_at_all' is not installed",
        ),
        ({"transport": "no_such_module_here:T"}, "No module named"),
        ({"transport": "json:NoSuchName"}, "json:NoSuchName does not exist"),
        ({"transport": "json:JSONDecoder"}, "json:JSONDecoder is not a Transport"),
        ({"options": "json:JSONDecoder"}, "json:JSONDecoder is not a Options"),
    ],
    ids=["no sdk", "no module", "no name", "no transport", "no options"],
)
def test_a_backend_that_cannot_be_loaded_says_why_and_how_to_install_it(changes, complaint):
    manager = PluginManager()
    manager.register(spec(**changes))
    with pytest.raises(PluginError) as caught:
        create_connector("mine", plugins=manager)
    assert complaint in str(caught.value)
    assert isinstance(caught.value, ImportError)
    if changes.get("sdk"):
        assert "pip install mine" in str(caught.value)


def test_whether_the_sdk_is_there_is_found_out_without_importing_it():
    assert spec().sdk_present()
    assert spec(sdk="json").sdk_present()
    assert not spec(sdk="no_such_sdk_at_all").sdk_present()
    assert not spec(sdk="no_such_sdk_at_all.part").sdk_present()


class Wrapping:
    """Counts what passes by standing before every transport."""

    def __init__(self):
        self.wrapped = []

    @hookimpl
    def omni_connector_wrap_transport(self, transport, context):
        self.wrapped.append((context.backend, type(transport)))

        class Wrapped(MemoryTransport):
            pass

        return Wrapped(context)


def test_an_extension_may_put_a_transport_before_each():
    manager, wrapping = PluginManager(), Wrapping()
    manager.register(wrapping)
    with create_connector("memory", plugins=manager) as conn:
        assert type(conn.transport).__name__ == "Wrapped"
        conn.put("k", 1)
        assert conn.get("k") == 1
    assert wrapping.wrapped == [("memory", MemoryTransport)]
    manager.unregister(wrapping)
    with create_connector("memory", plugins=manager) as conn:
        assert type(conn.transport) is MemoryTransport

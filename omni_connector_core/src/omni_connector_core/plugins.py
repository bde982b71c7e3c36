"""Finds backends: entry points name them, pluggy holds them, and none is imported before it is asked for.

A backend package declares, in its ``pyproject.toml``, one entry point whose name is the backend's::

    [project.entry-points.omni_connector]
    my_backend = "my_package.plugin"

and in that module, which imports no SDK::

    @hookimpl
    def omni_connector_backend() -> BackendSpec: ...

Entry points of the group ``omni_connector.extensions`` are for packages that add codec types or wrap transports; those are
all loaded when the first connector is made.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, cast

import pluggy

from omni_connector_core.capabilities import Capabilities
from omni_connector_core.errors import PluginError, UnknownBackendError
from omni_connector_core.options import Options, suggestion

if TYPE_CHECKING:
    from omni_connector_core.codec import Codec
    from omni_connector_core.context import TransportContext
    from omni_connector_core.transport import Transport

__all__ = ["BackendSpec", "DropIn", "PluginManager", "hookimpl", "hookspec", "plugin_manager"]

PROJECT = "omni_connector"
EXTENSIONS = "omni_connector.extensions"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropIn:
    """Lets a backend stand in for a connector that vLLM-Omni has built in.

    Attributes
    ----------
    name
        The built-in connector's name.
    options
        Its option names, each with the option of ours that means the same; None: accepted, of no effect here.
    """

    name: str
    options: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """What a plugin says of its backend; plain data, so that listing backends imports nothing.

    Attributes
    ----------
    name
        The entry point's name.
    summary
        One line for `omni-connector backends`.
    transport, options
        ``module:Class`` of the `Transport` and of its options, imported when a connector is made.
    capabilities
        The same that the transport class carries.
    install
        The pip command that installs the package with what it needs, shown when the SDK is missing.
    sdk
        Import name of the vendor SDK; None when the backend needs none.
    service
        ``module:function`` that starts the daemons a backend needs and returns an `omni_connector_core.services.Service`.
    drop_in
        The built-in vLLM-Omni connector that the backend can stand in for.
    """

    name: str
    summary: str
    transport: str
    options: str
    capabilities: Capabilities
    install: str
    sdk: str | None = None
    service: str | None = None
    drop_in: DropIn | None = None

    def sdk_present(self) -> bool:
        """Whether the vendor SDK can be imported, found out without importing it."""
        if self.sdk is None:
            return True
        try:
            return importlib.util.find_spec(self.sdk) is not None
        except ModuleNotFoundError:
            return False

    def load_options(self) -> type[Options]:
        """Import the options type."""
        options: type[Options] = self._load(self.options, Options)
        return options

    def load_transport(self) -> type[Transport]:
        """Import the transport, and with it the vendor SDK.

        Raises
        ------
        PluginError
            The SDK is missing, or the plugin's own code cannot be imported; says how to install it.
        """
        from omni_connector_core.transport import Transport

        transport: type[Transport] = self._load(self.transport, Transport)
        return transport

    def load_service(self) -> Any:
        """Import the function that starts the backend's daemons; None when it needs none."""
        return None if self.service is None else self._load(self.service, object)

    def _load(self, path: str, kind: type) -> Any:
        module, _, name = path.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except ImportError as error:
            missing = self.sdk is not None and not self.sdk_present()
            reason = f"its SDK {self.sdk!r} is not installed" if missing else str(error)
            raise PluginError(
                f"the backend cannot be loaded: {reason}", backend=self.name, hint=f"Install it: {self.install}"
            ) from error
        except AttributeError as error:
            raise PluginError(f"{path} does not exist", backend=self.name) from error
        if isinstance(found, type) and not issubclass(found, kind):
            raise PluginError(f"{path} is not a {kind.__name__}", backend=self.name)
        return found


class _Hooks:
    """What a plugin may implement."""

    @hookspec
    def omni_connector_backend(self) -> BackendSpec:  # type: ignore[empty-body]
        """Describe the one backend that this plugin's entry point names."""

    @hookspec
    def omni_connector_codec_types(self, codec: Codec) -> None:
        """Register payload types with the codec of a new connector."""

    @hookspec(firstresult=False)
    def omni_connector_wrap_transport(self, transport: Transport, context: TransportContext) -> Transport | None:
        """Return a transport that stands before the given one (metrics, fault injection), or None."""


class PluginManager:
    """The installed backends. Thread-safe; use `plugin_manager` for the process' own."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(_Hooks)
        self._specs: dict[str, BackendSpec] = {}
        self._extended = False
        self._lock = threading.RLock()

    def names(self) -> list[str]:
        """List the backends that are installed, importing none of them."""
        with self._lock:
            return sorted({point.name for point in entry_points(group=PROJECT)} | set(self._specs))

    def spec(self, name: str) -> BackendSpec:
        """Load one backend's plugin module, and no other.

        Raises
        ------
        UnknownBackendError
            Nothing installed has that name; lists what is.
        PluginError
            Two packages claim the name, or the plugin module itself fails to import (the cause is attached).
        """
        with self._lock:
            spec = self._specs.get(name)
            if spec is None:
                spec = self._specs[name] = self._load(name)
            return spec

    def register(self, plugin: object, *, name: str | None = None) -> None:
        """Add a plugin by hand: a module or object with hook implementations, or a `BackendSpec`.

        For tests, and for programs that bring their own backend. A backend replaces an installed one of the same name.
        """
        with self._lock:
            if not isinstance(plugin, BackendSpec):
                self._manager.register(plugin, name)
                hook = getattr(plugin, "omni_connector_backend", None)
                if hook is None:
                    return
                plugin = hook()
                assert isinstance(plugin, BackendSpec)
            self._specs[plugin.name] = plugin

    def unregister(self, plugin: object) -> None:
        """Take back what `register` added."""
        with self._lock:
            if isinstance(plugin, BackendSpec):
                self._specs.pop(plugin.name, None)
            else:
                self._manager.unregister(plugin)

    def extend_codec(self, codec: Codec) -> None:
        """Let plugins register their payload types."""
        self._load_extensions()
        self._manager.hook.omni_connector_codec_types(codec=codec)

    def wrap(self, transport: Transport, context: TransportContext) -> Transport:
        """Let plugins put transports before this one; the last one registered is outermost."""
        for implementation in self._manager.hook.omni_connector_wrap_transport.get_hookimpls():
            wrapper = implementation.function(transport=transport, context=context)
            transport = cast("Transport", wrapper or transport)
        return transport

    def _load(self, name: str) -> BackendSpec:
        points = {(point.value, _distribution(point)): point for point in entry_points(group=PROJECT, name=name)}
        if not points:
            names = self.names()
            raise UnknownBackendError(
                f"no backend {name!r} is installed{suggestion(name, names)}",
                hint=f"Installed: {', '.join(names) or 'none'}. "
                f"Backends are packages of their own: pip install omni-connector-{name.replace('_', '-')}",
            )
        if len(points) > 1:
            claims = " and ".join(sorted(f"{dist} ({value})" for value, dist in points))
            raise PluginError(
                f"two packages provide the backend {name!r}: {claims}",
                backend=name,
                hint="Uninstall one of them",
            )
        [point] = points.values()
        try:
            module = point.load()
        except Exception as error:  # a plugin's import may raise anything; its traceback is what the user needs
            raise PluginError(
                f"the plugin {point.value} of {_distribution(point)} fails to import: {type(error).__name__}: {error}",
                backend=name,
                hint="The plugin's own traceback is above",
            ) from error
        hook = getattr(module, "omni_connector_backend", None)
        spec = hook() if callable(hook) else None
        if not isinstance(spec, BackendSpec) or spec.name != name:
            raise PluginError(
                f"{point.value} of {_distribution(point)} has no omni_connector_backend() that describes {name!r}",
                backend=name,
            )
        if not self._manager.has_plugin(name):
            self._manager.register(module, name)
        return spec

    def _load_extensions(self) -> None:
        with self._lock:
            if not self._extended:
                self._extended = True
                for point in entry_points(group=EXTENSIONS):
                    try:
                        self._manager.register(point.load(), point.name)
                    except ImportError as error:
                        raise PluginError(f"the extension {point.value} fails to import: {error}") from error


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"


plugin_manager = PluginManager()
"""The process' own `PluginManager`."""

"""Compiles `omni_connector_core._native` into the wheel, if there is a C compiler; without one the wheel is pure Python."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError

PACKAGE = "omni_connector_core"


class NativeBuildHook(BuildHookInterface):
    """Adds the module to a wheel; to an editable one by putting it beside the sources."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, before hatchling collects the files."""
        root = Path(self.root)
        self.made = tempfile.TemporaryDirectory()
        folder = root / "src" / PACKAGE if version == "editable" else Path(self.made.name)
        try:
            module = compile_into(folder, root / "native")
        except (CCompilerError, ExecError, PlatformError) as error:
            self.app.display_warning(f"No compiled codec ({error}): the Python one does the same, more slowly")
            return
        build_data["infer_tag"] = True
        build_data["pure_python"] = False
        if version != "editable":
            build_data["force_include"][str(module)] = f"{PACKAGE}/{module.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what the wheel holds by now."""
        self.made.cleanup()


def compile_into(folder: Path, sources: Path) -> Path:
    """Compile the C files of a folder; returns the module."""
    extension = Extension(
        "_native",
        sorted(str(path) for path in sources.glob("*.c")),
        depends=[str(sources / "native.h")],
        extra_compile_args=["-O2", "-std=gnu11", "-fvisibility=hidden"],
    )
    command = build_ext(Distribution({"ext_modules": [extension]}))
    command.build_lib = str(folder)
    with tempfile.TemporaryDirectory() as objects:
        command.build_temp = objects
        command.ensure_finalized()
        command.run()
    return Path(command.get_ext_fullpath("_native"))

"""A backend's own script, which measures it beside the vendor's calls."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from omni_connector_contract_tests.harness.backend import Backend

__all__ = ["Bench", "load_script"]


class Bench(NamedTuple):
    """What a script is given.

    Attributes
    ----------
    backend
        What is measured, with the options of its running service.
    upstream
        Folder with vLLM-Omni's wheel; None leaves that comparison out.
    """

    backend: Backend
    upstream: Path | None


def load_script(script: Path) -> ModuleType:
    """Import a script: its ``measure(bench)`` yields ratios, its ``SERVICE``, if any, the settings of the daemons.

    It is imported under its own name, so that processes it starts can import it too.
    """
    sys.path.insert(0, str(script.parent.resolve()))
    return importlib.import_module(script.stem)

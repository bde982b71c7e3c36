"""The compiled part of the core, where this installation has it; its source is the folder ``native`` of the package.

Nothing but speed depends on it: what it does not know it leaves to the Python beside it, and tests hold the two equal.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Final

__all__ = ["native"]


def _load() -> ModuleType | None:
    if os.environ.get("OMNI_CONNECTOR_PURE_PYTHON"):  # for who wants to rule it out
        return None
    try:
        return importlib.import_module("omni_connector_core._native")
    except ImportError:
        return None


native: Final = _load()
"""The module, or None: built without a C compiler, or ruled out by ``OMNI_CONNECTOR_PURE_PYTHON``."""

"""A backend's own script, which measures it beside the vendor's calls."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from omni_connector_contract_tests.bench.ratio import Ratio
from omni_connector_contract_tests.harness.backend import Backend

__all__ = ["Bench", "measure_against"]


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


def measure_against(script: Path, bench: Bench) -> Iterator[Ratio]:
    """Run a script's ``measure``.

    The script is imported under its own name, so that processes it starts can import it too.
    """
    sys.path.insert(0, str(script.parent.resolve()))
    module = importlib.import_module(script.stem)
    ratios: Iterator[Ratio] = module.measure(bench)
    return ratios

"""Renders the results of several runs as one Markdown table of backends.

``python -m omni_connector_contract_tests.matrix RESULT.json...``
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from omni_connector_contract_tests.report import LEVELS
from omni_connector_core import Capabilities

__all__ = ["render"]


def render(paths: Iterable[Path]) -> str:
    """Render result files as a table: a row a backend, what passed by level, and what it claims."""
    results = sorted((json.loads(Path(path).read_text()) for path in paths), key=lambda result: str(result["backend"]))
    levels = [level for level in LEVELS if any(str(level) in result["levels"] for result in results)]
    claims = [field.name for field in fields(Capabilities)]
    lines = [
        _row(["backend", *(f"{level} {LEVELS[level]}" for level in levels), *(c.replace("_", " ") for c in claims)]),
        _row(["---"] * (1 + len(levels) + len(claims))),
    ]
    for result in results:
        passed = [_passed(result["levels"].get(str(level))) for level in levels]
        claimed = ["yes" if result["capabilities"].get(claim) else "" for claim in claims]
        lines.append(_row([f"`{result['backend']}`", *passed, *claimed]))
    notes = [
        f"\n`{result['backend']}` deviates: {test}: {reason}"
        for result in results
        for test, reason in result["deviations"].items()
    ]
    return "\n".join(lines + notes) + "\n"


def _passed(counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return "not run"
    passed, failed = counts.get("passed", 0), counts.get("failed", 0)
    return f"{passed} of {passed + failed}" if failed else f"all {passed}"


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    print(render(map(Path, sys.argv[1:])), end="")

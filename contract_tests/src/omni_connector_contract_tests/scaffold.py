"""Writes a new backend package that keeps the contract from the first day.

The package is the one in the folder `template`, which lints, type-checks and passes the suite like every other, under another
name.
"""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

__all__ = ["template_files", "write_package"]

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def write_package(name: str, folder: str | Path) -> list[Path]:
    """Write a backend package.

    Parameters
    ----------
    name
        The backend's name: small letters, digits and underscores, such as ``my_backend``.
    folder
        Where to write it: a folder that does not exist or is empty.

    Returns
    -------
    list of Path
        The files written.

    Raises
    ------
    ValueError
        The name cannot be one of a Python module.
    FileExistsError
        There is something in the folder.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ValueError(f"a backend's name is small letters, digits and underscores, such as my_backend, not {name!r}")
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty")
    camel = "".join(part.capitalize() for part in name.split("_"))

    def renamed(text: str) -> str:
        for old, new in (("my_backend", name), ("my-backend", name.replace("_", "-")), ("MyBackend", camel)):
            text = text.replace(old, new)
        return text

    written = []
    for relative, text in template_files().items():
        path = folder / renamed(relative)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(renamed(text))
        written.append(path)
    return written


def template_files() -> dict[str, str]:
    """Return the text of the template's files by path, as they are for the name ``my_backend``."""
    found: dict[str, str] = {}
    _collect(files("omni_connector_contract_tests") / "template", "", found)
    return dict(sorted(found.items()))


def _collect(folder: Traversable, prefix: str, found: dict[str, str]) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name != "__pycache__":
                _collect(entry, f"{prefix}{entry.name}/", found)
        else:
            found[prefix + entry.name] = entry.read_text()

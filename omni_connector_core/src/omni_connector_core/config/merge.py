"""A deploy file over its `base_config`: the overlay wins, with vLLM-Omni's rules.

Top-level scalars are replaced; `connectors` and `platforms` are merged by name, deeply; `stages` are merged by `stage_id`, in
each of which mappings are merged deeply and everything else is replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omni_connector_core.config.document import Mapped, Sequenced, read_yaml
from omni_connector_core.errors import ConfigError

__all__ = ["read_with_bases"]


def read_with_bases(path: Path, seen: tuple[Path, ...] = ()) -> Mapped:
    """Read a deploy file and everything it builds on.

    Raises
    ------
    ConfigError
        A file cannot be read, or the files build on each other in a circle.
    """
    path = path.resolve() if seen else path
    if path.resolve() in seen:
        raise ConfigError(f"{path}: base_config leads back to this file")
    document = read_yaml(path)
    base = document.get("base_config")
    if base is None:
        return document
    if not isinstance(base, str):
        raise ConfigError(f"{document.at('base_config')}: base_config is the path of a file")
    under = read_with_bases(path.parent / base, (*seen, path.resolve()))
    merged = Mapped()
    merged.position = document.position
    for source in (under, document):
        for key, value in source.items():
            if key == "base_config":
                continue
            old = merged.get(key)
            if key == "stages" and isinstance(old, Sequenced) and isinstance(value, Sequenced):
                value = _merge_stages(old, value)
            elif key in ("connectors", "platforms"):
                value = _merge(old, value)
            merged.put(key, value, source.at(key))
    return merged


def _merge(under: Any, over: Any) -> Any:
    if not (isinstance(under, Mapped) and isinstance(over, Mapped)):
        return over
    merged = Mapped()
    merged.position = over.position
    for key in [*under, *(key for key in over if key not in under)]:
        if key not in over:
            merged.put(key, under[key], under.at(key))
        else:
            merged.put(key, _merge(under.get(key), over[key]), over.at(key))
    return merged


def _merge_stages(under: Sequenced, over: Sequenced) -> Sequenced:
    def identity(stage: Any, index: int) -> Any:
        return stage.get("stage_id", ("no stage_id", index)) if isinstance(stage, Mapped) else ("not a stage", index)

    merged = Sequenced()
    merged.position = over.position
    overlay = {identity(stage, -1 - index): (stage, over.at(index)) for index, stage in enumerate(over)}
    for index, stage in enumerate(under):
        replaced = overlay.pop(identity(stage, index), None)
        if replaced is None:
            merged.put(stage, under.at(index))
        else:
            merged.put(_merge(stage, replaced[0]), replaced[1])
    for stage, position in overlay.values():
        merged.put(stage, position)
    return merged

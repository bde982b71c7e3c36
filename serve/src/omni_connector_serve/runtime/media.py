"""What a client sends and gets, between JSON and payloads.

A stage may put media into its output as ``{"media_type": "image/png", "data": bytes}``. Raw sound, ``audio/pcm`` with
``rate_hz`` and 16-bit mono samples, can be made in chunks; joined, it becomes a WAV.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import wave
from collections.abc import Iterable, Mapping
from typing import Any

from omni_connector_serve.runtime.errors import OutputError, RequestError

__all__ = ["join", "media_bytes", "render", "wav"]

PCM = "audio/pcm"


def media_bytes(name: str, text: str) -> bytes:
    """Decode base64, with or without a ``data:`` URL around it.

    Raises
    ------
    RequestError
        `text` is not base64.
    """
    if text.startswith("data:"):
        _, _, text = text.partition(",")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"media.{name} is not base64: {error}") from error


def join(chunks: Iterable[Any]) -> dict[str, Any]:
    """Join the outputs of a request, each a mapping, in the order in which they came.

    Under one name, media are concatenated, as are text and lists; of anything else the last counts.
    """
    parts: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, value in (chunk if isinstance(chunk, Mapping) else {"output": chunk}).items():
            parts.setdefault(name, []).append(value)
    return {name: _joined(values) for name, values in parts.items()}


def render(value: Any, place: str = "outputs") -> Any:
    """Turn an output into JSON: bytes to base64, arrays and tensors to lists, NaN and infinity, which JSON lacks, to null.

    Parameters
    ----------
    place
        Where the value stands, for the error.

    Raises
    ------
    OutputError
        Something in it has no form in JSON.
    """
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): render(item, f"{place}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [render(item, place) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if hasattr(value, "tolist"):
        return render(value.tolist(), place)
    raise OutputError(
        f"{place} is a {type(value).__name__}, which has no form in JSON; a stage gives media as "
        '{"media_type": ..., "data": bytes}, and other things as numbers, text, lists and mappings'
    )


def _joined(values: list[Any]) -> Any:
    last = values[-1]
    if _is_media(last):
        data = b"".join(bytes(value["data"]) for value in values)
        if last["media_type"] == PCM:
            return {"media_type": "audio/wav", "data": wav(data, last["rate_hz"])}
        return {**last, "data": data}
    if isinstance(last, str):
        return "".join(values)
    if isinstance(last, list):
        return [item for value in values for item in value]
    return last


def _is_media(value: Any) -> bool:
    return isinstance(value, Mapping) and "media_type" in value and "data" in value


def wav(samples: bytes, rate_hz: int) -> bytes:
    """Make a WAV file of 16-bit mono samples."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate_hz)
        out.writeframes(samples)
    return buffer.getvalue()

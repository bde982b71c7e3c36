"""PIL images. Imports PIL, and is itself imported when the first image is met.

Mode, size, pixels, palette, and the entries of ``info`` that are plain values. An image that was opened from a file
comes back as `PIL.Image.Image`, as from `Image.copy`: its pixels cross, and of several frames the current one.
PIL keeps rows apart, so pixels are copied once more on each side.
"""

from __future__ import annotations

from typing import Any, Final

from PIL import Image

from omni_connector_core.codec.walk import Lifter, Lowerer, Reader, UnencodableError, Writer
from omni_connector_core.codec.wire import IMAGE, Ext, pack
from omni_connector_core.errors import DecodeError

__all__ = ["LIFTERS", "lowerer"]

#: bytes per pixel; mode "1" has eight pixels in a byte
_PIXEL_NBYTES: Final = {
    **dict.fromkeys(("L", "P"), 1),
    **dict.fromkeys(("LA", "La", "PA", "I;16", "I;16L", "I;16B", "I;16N"), 2),
    **dict.fromkeys(("RGB", "YCbCr", "LAB", "HSV"), 3),
    **dict.fromkeys(("RGBA", "RGBa", "RGBX", "CMYK", "I", "F"), 4),
}
_PALETTED: Final = ("P", "PA")
_PLAIN: Final = (str, int, float, bool, bytes, type(None))


def _pixels_nbytes(mode: str, width: int, height: int) -> int:
    if mode == "1":
        return (width + 7) // 8 * height
    return _PIXEL_NBYTES[mode] * width * height


def _plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_plain, value)))


def lowerer(kind: type) -> Lowerer | None:
    """How to lower images of this class; None if it is not PIL's own."""
    return _lower if issubclass(kind, Image.Image) and kind.__module__.partition(".")[0] == "PIL" else None


def _lower(writer: Writer, value: Image.Image, depth: int) -> Any:
    try:
        value.load()
    except (OSError, ValueError, SyntaxError) as error:
        raise UnencodableError(f"an image that PIL cannot read: {error}") from error
    mode = value.mode
    if mode != "1" and mode not in _PIXEL_NBYTES:
        raise UnencodableError(f"an image of mode {mode!r}")
    width, height = value.size
    pixels = value.tobytes() if width and height else b""
    palette = None
    if mode in _PALETTED and value.palette is not None:
        palette = [value.palette.mode, bytes(value.getpalette(value.palette.mode) or ())]
    info = {name: item for name, item in value.info.items() if type(name) is str and _plain(item)}
    index = writer.put(pixels, len(pixels))
    return Ext(IMAGE, pack([index, mode, width, height, palette, writer.lower(info, depth + 1)]))


def _lift(reader: Reader, data: memoryview) -> Image.Image:
    index, mode, width, height, palette, info = reader.sequence(data, 6)
    pixels = reader.buffer(index)
    if mode != "1" and mode not in _PIXEL_NBYTES:
        raise DecodeError(f"image mode {mode!r} is not known")
    if not (type(width) is int and type(height) is int and width >= 0 and height >= 0 and type(info) is dict):
        raise DecodeError("an image has a wrong size or info")
    if _pixels_nbytes(mode, width, height) != pixels.nbytes:
        raise DecodeError(f"an image of {width} x {height} in mode {mode} in {pixels.nbytes} bytes")
    size = (width, height)
    # the numbers are bounded by the bytes, unless there are no bytes
    if not pixels.nbytes and max(size) >= 1 << 31:
        raise DecodeError("an image has a wrong size")
    image = Image.frombytes(mode, size, pixels.data) if pixels.nbytes else Image.new(mode, size)
    if palette is not None:
        _put_palette(image, palette)
    image.info = info
    return image


def _put_palette(image: Image.Image, palette: Any) -> None:
    if image.mode not in _PALETTED or type(palette) is not list or len(palette) != 2:
        raise DecodeError("an image has a palette of a wrong form")
    mode, colors = palette
    if mode not in ("RGB", "RGBA", "L", "CMYK", "HSV", "RGBX") or type(colors) is not bytes or len(colors) > 1024:
        raise DecodeError("an image has a palette of a wrong form")
    image.putpalette(colors, mode)


LIFTERS: dict[int, Lifter] = {IMAGE: _lift}

"""How does a drawing become a PNG in a few milliseconds?  (Notebook side.)

A chart is mostly flat: without PNG's filters, zlib finds the repeats faster and packs them
tighter than Pillow's encoder, which tries filters on every row.
"""

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

EFFORT = 3
"""Of zlib, 1 to 9: higher costs the kernel time, lower costs the browser bytes."""

SIGNATURE = b"\x89PNG\r\n\x1a\n"
EIGHT_BITS, RGBA = 8, 6


def png_of(pixels: NDArray[np.uint8]) -> bytes:
    """Return an image as PNG (ISO/IEC 15948).

    Args:
        pixels: of shape ``[height, width, 4]``: red, green, blue, alpha.
    """
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 4 * width), dtype=np.uint8)  # each begins with filter 0: none
    rows[:, 1:] = pixels.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, EIGHT_BITS, RGBA, 0, 0, 0)
    return b"".join(
        (
            SIGNATURE,
            _chunk(b"IHDR", head),
            _chunk(b"IDAT", zlib.compress(rows.data, EFFORT)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return b"".join(
        (
            struct.pack(">I", len(data)),
            kind,
            data,
            struct.pack(">I", zlib.crc32(data, zlib.crc32(kind))),
        )
    )

"""How does a drawing become a PNG in a few milliseconds, again and again?  (Notebook side.)

A chart is mostly flat: without PNG's filters, zlib finds the repeats faster and packs them
tighter than an encoder that tries filters on every row.  And from one redraw to the next most
rows stay as they are: a band of rows that has not changed is not packed again.
"""

import struct
import zlib
from typing import final

import numpy as np
from numpy.typing import NDArray

EFFORT = 3
"""Of zlib, 1 to 9: higher costs the kernel time, lower costs the browser bytes."""

BAND_ROWS = 24

SIGNATURE = b"\x89PNG\r\n\x1a\n"
EIGHT_BITS, RGBA = 8, 6
ZLIB_HEADER = b"\x78\x5e"
END_OF_STREAM = b"\x03\x00"
"""An empty last block of deflate (RFC 1951)."""


@final
class PngEncoder:
    """Encodes images of one size; keeps the last one, to see what has changed."""

    def __init__(self) -> None:
        self._last: NDArray[np.uint8] = np.empty((0, 0), dtype=np.uint8)
        self._bands: list[bytes] = []

    def encode(self, pixels: NDArray[np.uint8]) -> bytes:
        """Return an image as PNG (ISO/IEC 15948).

        Args:
            pixels: of shape ``[height, width, 4]``: red, green, blue, alpha.
        """
        height, width, _ = pixels.shape
        rows = np.zeros((height, 1 + 4 * width), dtype=np.uint8)  # each begins with filter 0: none
        rows[:, 1:] = pixels.reshape(height, -1)
        self._pack(rows)
        head = struct.pack(">IIBBBBB", width, height, EIGHT_BITS, RGBA, 0, 0, 0)
        checked = struct.pack(">I", zlib.adler32(rows.data))
        packed = b"".join((ZLIB_HEADER, *self._bands, END_OF_STREAM, checked))
        parts = (_chunk(b"IHDR", head), _chunk(b"IDAT", packed), _chunk(b"IEND", b""))
        return SIGNATURE + b"".join(parts)

    def _pack(self, rows: NDArray[np.uint8]) -> None:
        """Pack the bands that differ from the last image's."""
        is_known = self._last.shape == rows.shape
        bands = []
        for index, first in enumerate(range(0, len(rows), BAND_ROWS)):
            band = rows[first : first + BAND_ROWS]
            if is_known and np.array_equal(band, self._last[first : first + BAND_ROWS]):
                bands.append(self._bands[index])
            else:
                bands.append(_deflated(band))
        self._bands, self._last = bands, rows


def _deflated(band: NDArray[np.uint8]) -> bytes:
    """Return rows as deflate blocks that refer to none before them, and end on a whole byte."""
    packer = zlib.compressobj(EFFORT, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(band.data) + packer.flush(zlib.Z_FULL_FLUSH)


def _chunk(kind: bytes, data: bytes) -> bytes:
    checked = zlib.crc32(data, zlib.crc32(kind))
    return b"".join((struct.pack(">I", len(data)), kind, data, struct.pack(">I", checked)))

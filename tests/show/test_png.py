import io

import numpy as np
from PIL import Image

from ddpnb.notebook.show.png import PngEncoder


def drawn(rng: np.random.Generator, height: int = 100) -> np.ndarray:
    return rng.integers(0, 256, (height, 30, 4), dtype=np.uint8)


def decoded(png: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(png))
    image.verify()
    return np.asarray(Image.open(io.BytesIO(png)))


def test_what_is_encoded_comes_back():
    pixels = drawn(np.random.default_rng(0))
    np.testing.assert_array_equal(decoded(PngEncoder().encode(pixels)), pixels)


def test_only_what_changed_is_packed_again_and_the_picture_is_right():
    rng, encoder = np.random.default_rng(1), PngEncoder()
    pixels = drawn(rng)
    for row in (0, 50, 99):
        pixels = pixels.copy()
        pixels[row] = rng.integers(0, 256, (30, 4), dtype=np.uint8)
        np.testing.assert_array_equal(decoded(encoder.encode(pixels)), pixels)


def test_a_picture_of_another_size_is_no_trouble():
    rng, encoder = np.random.default_rng(2), PngEncoder()
    for height in (100, 40, 100):
        pixels = drawn(rng, height)
        np.testing.assert_array_equal(decoded(encoder.encode(pixels)), pixels)

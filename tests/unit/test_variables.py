"""What crosses in a message or a file is what was sent, writable and its receiver's own."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ddpnb.protocol.variables import dump, in_file, in_message, receive

NUM = 3_000_000


ARRAYS = {
    "structured": np.ones(NUM, dtype=[("a", "i4"), ("b", "f8")]),
    "objects": np.array([1, "x", None, [2]], dtype=object),
    "Fortran order": np.asfortranarray(np.arange(NUM).reshape(1000, -1)),
    "read-only": np.broadcast_to(np.arange(3), (NUM, 3)),
    "strided": np.arange(NUM)[::3],
    "permuted": np.arange(NUM).reshape(30, 100, -1).transpose(1, 0, 2),
    "empty": np.zeros((0, 3)),
    "small": np.arange(3),
}


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, str]]:
    path = str(tmp_path / "file")
    file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    yield file, path
    os.close(file)


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("in_a_file", [False, True])
def test_arrays_arrive_equal_and_writable(name: str, in_a_file: bool, file: tuple[int, str]):
    array = ARRAYS[name]
    parts = dump(array, for_ranks=False)
    found = receive(in_file(parts, *file) if in_a_file else in_message(parts))
    assert found.dtype == array.dtype
    assert found.flags.writeable
    assert found.flags.fnc == array.flags.fnc
    np.testing.assert_array_equal(found, array)


def test_a_large_array_is_written_once_and_each_receiver_has_its_own(file: tuple[int, str]):
    array = np.zeros(NUM)
    parcel = in_file(dump({"x": array, "same": array}, for_ranks=True), *file)
    assert os.fstat(file[0]).st_size < 1.01 * array.nbytes
    assert parcel.parts == ()
    first, second = receive(parcel), receive(parcel)
    os.unlink(file[1])
    first["x"] += 1
    assert first["same"] is first["x"]
    assert second["x"].sum() == array.sum() == 0


def test_more_than_memory_holds_is_refused_in_a_sentence(file: tuple[int, str]):
    parts = dump(np.zeros(NUM), for_ranks=False)
    with pytest.raises(MemoryError, match=r"^0\.0 GB from each of 10000000 ranks, and .* free$"):
        in_file(parts, *file, num_copies=10_000_000)
    assert os.fstat(file[0]).st_size == 0

"""Arrays that cross in a message or a file arrive equal, writable and as separate copies."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ddpnb.protocol.variables import dump, packed, receive

NUM = 2_400_000
"""More bytes than an array needs to be mapped from a file."""


ARRAYS = {
    "structured": np.ones(NUM, dtype=[("a", "i4"), ("b", "f8")]),
    "objects": np.array([1, "x", None, [2]], dtype=object),
    "Fortran order": np.asfortranarray(np.arange(NUM).reshape(1000, -1)),
    "read-only": np.broadcast_to(np.arange(3), (NUM // 3, 3)),
    "strided": np.arange(NUM)[::3],
    "permuted": np.arange(NUM).reshape(30, 100, -1).transpose(1, 0, 2),
    "empty": np.zeros((0, 3)),
    "small": np.arange(3),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file"


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("in_a_file", [False, True])
def test_arrays_arrive_equal_and_writable(name: str, in_a_file: bool, file: Path):
    array = ARRAYS[name]
    parts = dump(array, for_ranks=False)
    found = receive(packed(parts, str(file) if in_a_file else ""))
    assert found.dtype == array.dtype
    assert found.flags.writeable
    assert found.flags.fnc == array.flags.fnc
    np.testing.assert_array_equal(found, array)


def test_a_large_array_is_written_once_and_each_receiver_has_its_own(file: Path):
    array = np.zeros(NUM)
    parcel = packed(dump({"x": array, "same": array}, for_ranks=True), str(file))
    assert file.stat().st_size < 1.01 * array.nbytes
    assert parcel.parts == ()
    first, second = receive(parcel), receive(parcel)
    file.unlink()
    first["x"] += 1
    assert first["same"] is first["x"]
    assert second["x"].sum() == array.sum() == 0


def test_more_than_memory_holds_is_refused_in_a_sentence(file: Path):
    parts = dump(np.zeros(NUM), for_ranks=False)
    with pytest.raises(
        MemoryError, match=r"^it needs 0\.0 GB for each of 10000000 ranks, .* free$"
    ):
        packed(parts, str(file), num_copies=10_000_000)
    assert file.stat().st_size == 0


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("for_ranks", [True, False])
def test_torchscript_arrives_also_as_a_part_of_a_model(for_ranks: bool):
    scripted = torch.jit.script(torch.nn.Linear(3, 2))
    model = torch.nn.Sequential(scripted, torch.nn.ReLU())
    made = receive(packed(dump(model, for_ranks=for_ranks), ""))
    assert torch.equal(made(torch.ones(1, 3)), model(torch.ones(1, 3)))

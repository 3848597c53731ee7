"""Everything works in any combination of read-only, missing, small and long folders."""

import itertools
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest

from ddpnb.results.store import FILE_NAME
from tests.cluster.rig import DYNAMO, wait_until_gone
from tests.kernel.client import Kernel
from tests.places import OTHER_USER, SHM, inside

NOTEBOOKS = ("usual", "read-only", "with runs")
HOMES = ("usual", "read-only", "absent")
TEMPORARY = ("usual", "read-only", "absent", "long")
PLACES = [*itertools.product(NOTEBOOKS, HOMES, SHM, TEMPORARY)]
CELLS = (
    "%ddp_start -n 2 --device cpu",
    "%ddp_compare ddp hogwild async --task synthetic --epochs 0.2 --no-baseline --name race",
    "%%ddp --name loop\nimport ddpnb\nfor i in range(3):\n    ddpnb.log(loss=1.0, samples=4)",
    "import numpy as np\nbig = np.ones(1 << 20)\n%ddp_push big",
    "%ddp_runs",
    "%ddp_plot race",
)
TOO_LARGE = """%%ddp_compare ddp --no-baseline --data-workers 1 --batch-size 32
import torch
def model(): return torch.nn.Linear(2, 2)
def data(split): return [(torch.ones(2), number % 2, number) for number in range(64)]
def collate_fn(items):
    large = torch.zeros(32 << 20)  # 128 MB
    return torch.stack([x for x, *_ in items]), torch.tensor([y for _, y, _ in items]), large
def training_step(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
DATA_WORKER = "%%ddp\nfrom torch.utils.data import DataLoader\nlist(DataLoader([1], num_workers=1))"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can enter."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def check(place: Path, notebook: str, home: str, shm: str, temporary: str, **more: str) -> None:
    """Run all cells in a kernel, and check where the runs are."""
    user = OTHER_USER if more else 0
    course, here = place / "course", place / "course/notebooks"
    home_folder, short, long = place / "home", place / "tmp", place / ("t" * 95)
    for folder in (here, course / "data", home_folder, short, long, place / "matplotlib"):
        folder.mkdir(parents=True, exist_ok=True)
        if user and course not in (folder, *folder.parents):
            os.chown(folder, user, user)
    for fonts in Path(matplotlib.get_cachedir()).glob("fontlist*"):  # finding all takes seconds
        shutil.copy(fonts, place / "matplotlib")
    if notebook == "with runs":
        (course / "data/runs").mkdir()
        lessons = Path(__file__).parents[2] / "data/lessons.sqlite3"
        shutil.copy(lessons, course / "data/runs" / FILE_NAME)
    tmp = {"long": long, "absent": place / "gone"}.get(temporary, short)
    environment = {
        "HOME": str(home_folder / "gone" if home == "absent" else home_folder),
        "TMPDIR": str(tmp),
        "XDG_DATA_HOME": "",
        "MPLCONFIGDIR": str(place / "matplotlib"),
        **DYNAMO,
    }
    is_open = notebook == "usual" and not user
    states = (
        (course, is_open),
        (home_folder, home == "usual"),
        (tmp, temporary != "read-only"),
    )
    read_only = [folder for folder, is_usual in states if not is_usual]
    kernel = Kernel(
        here, environment, inside(place, read_only=read_only, shm=shm, user=user, **more)
    )
    try:
        text = ""
        for source in ("%load_ext ddpnb", *CELLS):
            cell = kernel.run(source, timeout=120).passed
            text += f"{source}\n{cell.text}\n"
            assert not cell.stderr, cell.stderr
        if shm not in ("read-only", "absent"):  # torch sends tensors of data workers through it
            kernel.run(DATA_WORKER).passed  # noqa: B018
        if shm == "small":
            assert "/dev/shm is full, so processes" in kernel.run(TOO_LARGE).error_text
        text += kernel.run("%%rank 1\nimport os\nos._exit(3)").text
        assert "arning" not in text, text
        if notebook == "with runs":
            assert "race-1" in kernel.run("%ddp_runs").text
        notes = re.findall(r"You cannot write to .*, so ddpnb stores runs in (\S+)(.*)", text)
        assert len(notes) == (not is_open), text
        for folder, rest in notes:
            is_kept = Path(folder).is_relative_to(home_folder)
            assert is_kept == (home == "usual")
            assert is_kept != ("until the kernel ends" in rest)
            assert (Path(folder) / FILE_NAME).exists()
        started = kernel.processes
    finally:
        kernel.stop()
    wait_until_gone(started)
    assert all(Path(folder).exists() == (home == "usual") for folder, _ in notes)
    assert is_open == (course / "data/runs" / FILE_NAME).exists() or notebook == "with runs"


# With this seed, each value of each folder occurs in one of the four cases.
@pytest.mark.parametrize("case", random.Random(703).sample(PLACES, 4), ids=" ".join)
def test_all_works_where_folders_are_read_only_missing_small_or_long(place: Path, case: tuple):
    """In the case with a small /dev/shm, the user is not root and has small limits."""
    # The connection file of the kernel belongs to root.
    limits = f'chown {OTHER_USER} "${{@: -1}}"; ulimit -n 256 -u 200'
    check(place, *case, **{"limits": limits} if "small" in case else {})

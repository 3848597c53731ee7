"""The run folder: who needs it, across processes that cannot see each other."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpnb.cluster.run_folder import private_folder, remove_leftovers
from ddpnb.protocol.processes import SERVER_LOCK, hold, is_held


@pytest.fixture
def folder() -> Iterator[Path]:
    made = private_folder()
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_a_folder_stays_while_its_fork_server_lives(folder: Path):
    assert folder not in remove_leftovers(), "it is just being made"
    with hold(folder / SERVER_LOCK):
        assert folder not in remove_leftovers()
    assert folder in remove_leftovers()
    assert not folder.exists()


def test_a_killed_holder_holds_nothing(folder: Path):
    code = (
        "import sys; from pathlib import Path; from ddpnb.protocol.processes import hold;"
        "lock = hold(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    path = folder / SERVER_LOCK
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert is_held(path)
        process.kill()
    assert not is_held(path)

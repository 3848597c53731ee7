"""The run folder: who needs it, across processes that cannot see each other."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpnb.cluster.run_folder import private_folder, remove_leftovers
from ddpnb.protocol.processes import SERVER_LOCK


@pytest.fixture
def folder() -> Iterator[Path]:
    made = private_folder()
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_a_folder_stays_until_its_fork_server_ends_even_by_a_kill(folder: Path):
    assert folder not in remove_leftovers(), "it is just being made"
    code = (
        "import sys; from pathlib import Path; from ddpnb.protocol.processes import hold;"
        "lock = hold(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, str(folder / SERVER_LOCK)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        assert folder not in remove_leftovers()
        server.kill()
    assert folder in remove_leftovers()
    assert not folder.exists()

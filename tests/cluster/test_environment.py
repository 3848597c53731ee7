"""A host that is not as one would like: its name leads nowhere, and torchrun's port is taken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import find_program

ROOT = Path(__file__).parents[2]
ON_A_HOST = """
import contextlib, json, socket
from tests.cluster.rig import ALL_REDUCE, pull, run, started
try:
    found = socket.gethostbyname(socket.gethostname())
except OSError:
    found = ""
taken = socket.socket()
with contextlib.suppress(OSError):  # somebody else has it: as well
    taken.bind(("127.0.0.1", 29500))
    taken.listen()
with started(2) as cluster:
    failures = run(cluster, ALL_REDUCE).failures
    seen = pull(cluster, "total.item(), __import__('os').environ['MASTER_PORT']")
    print(json.dumps([found, len(failures), seen]))
"""


def test_the_hosts_name_need_not_resolve_and_torchruns_port_may_be_taken() -> None:
    """As on a laptop in a train; in a name space of its own, so that the host keeps its name."""
    for program in ("unshare", "hostname"):
        find_program([program], "a host name of its own needs unshare(1) and hostname(1)")
    named = ["unshare", "--uts", "sh", "-c", 'hostname nosuch.invalid && exec "$@"', "sh"]
    if subprocess.run([*named, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("a host name of its own needs the right to unshare")
    ended = subprocess.run(
        [*named, sys.executable, "-c", ON_A_HOST],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found, num_failures, seen = json.loads(ended.stdout.splitlines()[-1])
    if found:
        pytest.skip(f"here even nosuch.invalid resolves, to {found}")
    assert num_failures == 0
    assert [total for total, _ in seen] == [2.0, 2.0]
    assert "29500" not in [port for _, port in seen]

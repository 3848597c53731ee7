"""Do ranks that a profile of ipyparallel starts work and end like those over ssh?"""

import contextlib
import functools
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.placement import ClusterSpec
from ddpnb.cluster.profile import distinct
from ddpnb.history.store import Store
from ddpnb.protocol.errors import UserError
from ddpnb.session.comparison import prepare
from ddpnb.session.status import status_table
from tests.cluster.rig import (
    begin,
    finish,
    knock,
    pull,
    run,
    shown,
    wait_until,
    wait_until_gone,
)
from tests.cluster.simulated_slurm import jobs, simulated_slurm
from tests.cluster.test_hosts import REDUCE_FOR_EVER, a_comparison, total

LOCAL = "c.Cluster.engine_launcher_class = 'local'\n"
"""Its programs run on this host: what batch systems start elsewhere."""
NOTHING = "c.Cluster.engine_launcher_class = 'batch'\n"
SLURM = '''
c.Cluster.engine_launcher_class = "slurm"
c.SlurmEngineSetLauncher.batch_template = """#!/bin/sh
#SBATCH --job-name ddpnb-profile --nodes {n} --ntasks-per-node 1 --output /dev/null
srun --mem=0 --cpu-bind=none --mpi=none {program_and_args}
"""
'''


@pytest.fixture
def profile(monkeypatch, tmp_path) -> Callable[[str], str]:
    return functools.partial(write_profile, monkeypatch, tmp_path)


def write_profile(monkeypatch: pytest.MonkeyPatch, folder: Path, config: str) -> str:
    """Write a profile of ipyparallel into a folder that is this process's; return its name."""
    monkeypatch.setenv("HOME", str(folder))  # where keys are for a moment
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    place = folder / "ipython/profile_site"
    place.mkdir(parents=True, exist_ok=True)
    (place / "ipcluster_config.py").write_text(f"c = get_config()\n{config}")
    return "site"


@pytest.fixture
def here(profile) -> Iterator[Cluster]:
    """Four ranks on two hosts, which are both this one."""
    cluster = Cluster.start(two_each(profile(LOCAL)))
    try:
        yield cluster
    finally:
        cluster.stop()


def two_each(name: str, **options) -> ClusterSpec:
    options = {"num_ranks": 4, "ranks_per_host": 2, "device": "cpu", "num_threads": 1} | options
    return ClusterSpec(profile=name, **options)


def started() -> list[psutil.Process]:
    """What the profile's launcher has started for this process's clusters, and all below it."""
    holders = children_with("ddpnb.launcher.profile")
    return [*holders, *(below for each in holders for below in each.children(recursive=True))]


def children_with(word: str) -> list[psutil.Process]:
    """This process's children with a word in their command line."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has ended
            if word in child.cmdline():
                found.append(child)
    return found


@pytest.fixture
def others() -> set[psutil.Process]:
    """Processes of clusters that the package's tests share."""
    return set(psutil.Process().children(recursive=True))


def test_ranks_of_a_profile_work_end_and_leave_nothing(others, here, tmp_path):
    assert total(here) == [4.0] * 4
    name = socket.gethostname()
    rows = [row[1].text for row in status_table(here, ()).rows]
    assert rows == [name, name, f"{name}-2", f"{name}-2"]
    (found,) = prepare(here, Store(tmp_path), a_comparison("ddp")).run().comparison.runs
    assert found.status == "finished"
    run(here, "import subprocess\nsubprocess.Popen(['sleep', '600'])")
    left = {*started(), *psutil.Process().children(recursive=True)} - others
    assert len(left) >= 10
    here.stop()
    here.stop()
    wait_until_gone([*left])


def test_a_killed_agent_is_replaced(here, tmp_path):
    run(here, "import torch, torch.distributed as dist\nkept = rank")
    cell = begin(here, REDUCE_FOR_EVER.format(sign=f"{tmp_path}/"))
    wait_until(lambda: len([*tmp_path.glob("[0-3]")]) == 4, "all ranks in the cell")
    (agent,) = {psutil.Process(each.pid).ppid() for each in here.states[2:]}
    psutil.Process(agent).kill()
    finish(cell)
    assert set(cell.lost) == {2, 3}
    assert f"was lost with host {socket.gethostname()}-2: its connection" in cell.lost[2]
    assert pull(here, "kept", ranks=[0, 1]) == ["of rank 0", "of rank 1"]
    here.bring_back([2, 3])
    assert total(here) == [4.0] * 4


def test_a_host_whose_program_is_gone_is_named_and_not_waited_for_long(here):
    parents = psutil.Process(here.states[2].pid).parents()
    (program,) = [each for each in parents if each.cmdline()[2:3] == ["ddpnb.launcher.tunnel"]]
    program.kill()
    wait_until(lambda: set(here.dead) == {2, 3}, "the end of both ranks")
    with pytest.raises(UserError, match=r"has not come again.*%ddp_restart"):
        here.bring_back([2, 3])
    assert here.dead == (2, 3)


def test_a_way_to_a_host_that_is_lost_is_made_anew(here, tmp_path):
    program = psutil.Process(here.states[2].pid).parents()
    for keeper in children_with("serve"):
        (serve,) = keeper.children()
        place = json.loads(Path(keeper.cmdline()[-1]).read_text())
        if place["log"].endswith("host-1.log"):
            serve.kill()
    wait_until(lambda: here.dead == (2, 3), "the end of both ranks")
    wait_until_gone(program[:1])
    here.bring_back([2, 3])
    assert total(here) == [4.0] * 4
    assert psutil.Process(here.states[2].pid).parents()[-3:] == program[-3:]


def test_a_host_that_comes_in_place_of_another_is_not_taken(here):
    here.processes._starter._came[1] = "other"  # as where a queue starts a job again elsewhere
    agent = psutil.Process(here.states[2].pid).parent()
    agent.kill()
    wait_until(lambda: here.dead == (2, 3), "the end of both ranks")
    with pytest.raises(
        UserError, match=r"In place of host .*-2, profile site gives .*: start anew"
    ):
        here.bring_back([2, 3])
    assert here.dead == (2, 3)


def test_strangers_change_nothing_and_no_key_is_to_be_seen(here):
    keepers = children_with("serve")
    places = [json.loads(Path(each.cmdline()[-1]).read_text()) for each in keepers]
    knock([(place["address"], place["port"]) for place in places])
    assert total(here) == [4.0] * 4
    keys = [key.encode() for key in places[0]["server"]]
    for process in [*psutil.Process().children(recursive=True), *started()]:
        assert not any(key in shown(process) for key in keys), process
    assert not list(Path.home().glob(".ddpnb-*.json"))


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    with simulated_slurm():
        yield


def test_a_job_of_a_profile_starts_and_stop_leaves_none(slurm, profile):
    cluster = Cluster.start(two_each(profile(SLURM)))
    try:
        assert total(cluster) == [4.0] * 4
        assert len(jobs().splitlines()) == 1
    finally:
        cluster.stop()
    wait_until(lambda: not jobs(), "the job's end")


def test_a_killed_kernel_leaves_no_job_of_a_profile(slurm, profile):
    source = (
        f"import ddpnb, time; ddpnb.start(2, profile={profile(SLURM)!r}, ranks_per_host=1,"
        "device='cpu'); print('go', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as kernel:
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == b"go\n"
        left = psutil.Process(kernel.pid).children(recursive=True)
        kernel.kill()
    wait_until(lambda: not jobs(), "the job's end", timeout=60)
    wait_until_gone(left)


def test_a_job_of_a_profile_that_waits_for_ever_ends_at_the_timeout(slurm, profile):
    said = []
    name = profile(SLURM.replace("--nodes", "--begin now+1hour --nodes"))
    with pytest.raises(UserError, match="0 of 2 hosts of profile site have come within 2 s"):
        Cluster.start(two_each(name, timeout=2.0), said.append)
    assert "waiting for the hosts of profile site: 0 of 2" in said
    wait_until(lambda: not jobs(), "the job's end")


BATCH = """
c.Cluster.engine_launcher_class = "slurm"
c.SlurmEngineSetLauncher.batch_template = "#!/bin/sh"
c.SlurmEngineSetLauncher.submit_command = ["sh", "-c", "{submit}; echo 7"]
c.SlurmEngineSetLauncher.delete_command = ["sh", "-c", "touch {deleted}"]
"""
"""A batch system whose jobs never start."""


def test_a_way_that_is_lost_while_hosts_are_waited_for_is_named(profile, tmp_path):
    def lose(said: str) -> None:
        for keeper in children_with("serve"):
            keeper.children()[0].kill()

    deleted = tmp_path / "deleted"
    name = profile(BATCH.format(submit="true", deleted=deleted))
    with pytest.raises(UserError, match="The way to a host of profile site was lost with 0 of 2"):
        Cluster.start(two_each(name), lose)
    assert deleted.exists()
    assert not started()


def test_a_kernel_that_is_killed_while_a_job_is_submitted_leaves_none(profile, tmp_path):
    asked, deleted = tmp_path / "asked", tmp_path / "deleted"
    name = profile(BATCH.format(submit=f"touch {asked}; sleep 2", deleted=deleted))
    options = f"profile={name!r}, ranks_per_host=1, device='cpu', timeout=60"
    source = f"import ddpnb; ddpnb.start(2, {options})"
    with subprocess.Popen([sys.executable, "-c", source]) as kernel:
        wait_until(asked.exists, "the job")
        left = psutil.Process(kernel.pid).children(recursive=True)
        kernel.kill()
    wait_until(deleted.exists, "the job's end")
    wait_until_gone(left)
    assert not list(Path.home().glob(".ddpnb-*.json"))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("c.Cluster.engine_launcher_class = 'nowhere'\n", "Profile site cannot be used: "),
        (NOTHING, "The launcher of profile site has started nothing: "),
        ("1 / 0\n", "Profile site cannot be used: ZeroDivisionError: division by zero"),
    ],
)
def test_a_profile_that_starts_nothing_is_named(profile, config, sentence):
    with pytest.raises(UserError, match=sentence):
        Cluster.start(two_each(profile(config)))
    assert not started()
    assert not list(Path.home().glob(".ddpnb-*.json"))


def test_a_host_that_cannot_run_the_program_is_not_waited_for(profile):
    sentence = "The launcher of profile site has ended, with 0 of 2 hosts there: .*No module named"
    with pytest.raises(UserError, match=sentence):
        Cluster.start(two_each(profile(LOCAL), python="/usr/bin/python3"))
    assert not started()


def test_a_profile_that_is_not_there_is_named(profile):
    profile(LOCAL)
    with pytest.raises(UserError, match=r"There is no profile other in .*; there is site: make"):
        Cluster.start(two_each("other"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_ranks": None, "ranks_per_host": None}, "--profile needs -n"),
        ({"engines": "slurm"}, "--profile starts the ranks"),
        ({"num_ranks": 3}, "-n 3 is no multiple"),
        ({"timeout": 0.0}, "seconds above 0, not 0"),
    ],
)
def test_options_that_do_not_go_together(options, sentence):
    with pytest.raises(UserError, match=sentence):
        two_each("site", **options)


def test_hosts_of_one_name_are_told_apart():
    assert distinct(["a", "b", "a", "a"]) == ["a", "b", "a-2", "a-3"]
    assert distinct(["a", "a", "a-2"]) == ["a", "a-2", "a-2-2"]

import os
from pathlib import Path

import pytest

from ddpnb.cluster.placement import (
    ClusterSpec,
    HostReport,
    Placement,
    place_on_hosts,
    place_ranks,
    torchrun_environment,
)
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.processes import num_cores


@pytest.mark.parametrize(
    ("choices", "num_gpus", "devices", "shared"),
    [
        ({}, 0, ("cpu",) * max(2, min(4, num_cores())), []),
        ({"num_ranks": 3}, 0, ("cpu",) * 3, []),
        ({}, 4, ("cuda:0", "cuda:1", "cuda:2", "cuda:3"), []),
        ({"num_ranks": 3}, 2, ("cuda:0", "cuda:1", "cuda:0"), [0, 2]),
        ({"num_ranks": 2, "device": "cpu"}, 8, ("cpu", "cpu"), []),
        ({"devices": "8"}, 4, ("cpu",) * 8, []),
    ],
)
def test_ranks_get_gpus_one_by_one_or_share_the_cores(
    choices: dict[str, object], num_gpus: int, devices: tuple[str, ...], shared: list[int]
):
    plan = place_ranks(ClusterSpec(**choices), num_gpus)  # type: ignore[arg-type]
    assert plan.devices == devices
    assert [rank for rank in range(plan.num_ranks) if plan.shares_device(rank)] == shared
    assert plan.backend == ("nccl" if "cuda" in devices[0] and not shared else "gloo")


@pytest.mark.parametrize("num_ranks", [1, 2, 7, 64])
def test_threads_are_the_cores_divided_by_the_ranks_and_at_least_one(num_ranks: int):
    plan = place_ranks(ClusterSpec(num_ranks=num_ranks), 0)
    assert plan.num_threads == max(1, num_cores() // num_ranks)
    assert place_ranks(ClusterSpec(num_ranks=num_ranks, num_threads=5), 0).num_threads == 5


@pytest.mark.parametrize(
    ("choices", "num_gpus", "expected"),
    [
        ({"device": "cuda"}, 0, "There is no GPU on this machine: use --device cpu"),
        ({"backend": "nccl"}, 0, "there is none here: use --backend gloo"),
        ({"backend": "nccl", "num_ranks": 3}, 2, "use -n 2, or --backend gloo"),
    ],
)
def test_what_the_machine_cannot_do_is_refused(
    choices: dict[str, object], num_gpus: int, expected: str
):
    with pytest.raises(UserError) as caught:
        place_ranks(ClusterSpec(**choices), num_gpus)  # type: ignore[arg-type]
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ({"device": "tpu"}, "auto, cpu, cuda"),
        ({"backend": "mpi"}, "auto, gloo, nccl"),
        ({"num_ranks": 0}, "-n"),
        ({"num_ranks": 257}, "256"),
        ({"num_threads": 0}, "--threads"),
        ({"device": "cpu", "backend": "nccl"}, "--backend gloo"),
        ({"devices": "8xH900"}, "V100, A100, T4"),
        ({"devices": "8", "num_ranks": 4}, "leave -n 4 out"),
        ({"devices": "8", "device": "cuda"}, "on the CPU"),
        ({"devices": "8", "hosts": "a:4,b:4"}, "of this host"),
        ({"as_": "resnet50"}, "--devices"),
    ],
)
def test_a_wrong_choice_is_refused_at_once(choices: dict[str, object], named: str):
    with pytest.raises(UserError) as caught:
        ClusterSpec(**choices)  # type: ignore[arg-type]
    assert named in str(caught.value)


SET_BY_TORCHRUN = {
    *("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "ROLE_NAME", "OMP_NUM_THREADS"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
}


def test_the_environment_is_torchruns():
    plan = Placement(devices=("cpu",) * 3, backend="gloo", num_threads=2)
    environment = torchrun_environment(plan, 2, 4242)
    assert (
        environment
        | {
            "RANK": "2",
            "LOCAL_RANK": "2",
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "4242",
            "OMP_NUM_THREADS": "2",
            "ACCELERATE_USE_CPU": "true",
        }
        == environment
    )
    assert set(environment) >= SET_BY_TORCHRUN
    assert environment["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_across_hosts_ranks_are_counted_on_each_one_anew():
    host = HostReport(name="a", address="10.0.0.1", interface="eth0", num_cores=2)
    plan = Placement(
        devices=("cpu",) * 3, backend="gloo", num_threads=2, hosts=(host, host), sizes=(2, 1)
    )
    found = [torchrun_environment(plan, rank, 4242) for rank in range(3)]
    assert [each["LOCAL_RANK"] for each in found] == ["0", "1", "0"]
    assert [each["GROUP_RANK"] for each in found] == ["0", "0", "1"]
    assert [each["LOCAL_WORLD_SIZE"] for each in found] == ["2", "2", "1"]


def test_hyper_threads_of_one_core_count_once(tmp_path: Path):
    cpus = os.sched_getaffinity(0)
    for cpu in cpus:
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0-63\n")
    assert num_cores(tmp_path) == 1
    assert num_cores(tmp_path / "unknown") == len(cpus)


def on_hosts(*num_gpus: int, **choices: str) -> Placement:
    """Place three ranks on each of some hosts."""
    names = [f"h{number}" for number in range(len(num_gpus))]
    reports = [
        HostReport(name=name, address="", interface="", num_cores=2, num_gpus=num)
        for name, num in zip(names, num_gpus, strict=True)
    ]
    hosts = ",".join(f"{name}:3" for name in names)
    return place_on_hosts(ClusterSpec(hosts=hosts, **choices), reports)


@pytest.mark.parametrize(
    ("num_gpus", "choices", "sentence"),
    [
        ((3, 0), {"device": "cuda"}, "Host h1 has no GPU: use --device cpu, or leave the host out"),
        ((3, 0), {}, "Host h1 has no GPU and another has"),
        ((3, 2), {"backend": "nccl"}, "Host h1: NCCL allows one rank per GPU, and 3 ranks do not"),
    ],
)
def test_a_host_with_fewer_gpus_than_asked_is_named(num_gpus, choices, sentence):
    with pytest.raises(UserError, match=sentence):
        on_hosts(*num_gpus, **choices)


def test_hosts_share_their_gpus_as_one_host_does():
    assert on_hosts(3, 3).backend == "nccl"
    plan = on_hosts(3, 2)
    assert plan.backend == "gloo"
    assert plan.devices[3:] == ("cuda:0", "cuda:1", "cuda:0")

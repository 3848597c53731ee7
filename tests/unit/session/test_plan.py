from collections import Counter
from dataclasses import replace

import pytest

from ddpnb.cluster.placement import (
    ClusterSpec,
    Host,
    Placement,
    place_ranks,
    torchrun_environment,
)
from ddpnb.protocol.cores import num_cores
from ddpnb.protocol.errors import UserError


def placed(spec: ClusterSpec, num_gpus: int) -> Placement:
    """Place ranks on this host, as if it had ``num_gpus`` GPUs."""
    return place_ranks(spec, [Host(num_cores=num_cores(), num_gpus=num_gpus)])


CORES = int(num_cores())
DEFAULT = max(2, min(4, CORES))
PLACED = [
    ({}, 0, ["cpu"] * DEFAULT, "gloo"),
    ({"num_ranks": 64}, 0, ["cpu"] * 64, "gloo"),
    ({}, 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], "nccl"),
    ({"num_ranks": 2, "device": "cpu"}, 8, ["cpu", "cpu"], "gloo"),
    ({"devices": "8"}, 4, ["cpu"] * 8, "gloo"),
]
"""Choices, the number of GPUs, the ranks' devices, and the backend."""


@pytest.mark.parametrize(("choices", "num_gpus", "devices", "backend"), PLACED)
def test_ranks_are_on_gpus_or_share_the_cores(
    choices: dict[str, object], num_gpus: int, devices: list[str], backend: str
):
    plan = placed(ClusterSpec(**choices), num_gpus)
    assert (list(plan.devices), plan.backend) == (devices, backend)
    assert plan.num_threads == max(1, CORES // len(devices))


@pytest.mark.parametrize("num_gpus", range(1, 5))
@pytest.mark.parametrize("num_ranks", range(1, 5))
def test_ranks_use_nccl_on_a_gpu_each_and_share_gpus_over_gloo(num_ranks: int, num_gpus: int):
    """Two ranks use NCCL on two T4 (Kaggle), and share one T4 over gloo (Colab)."""
    plan = placed(ClusterSpec(num_ranks=num_ranks), num_gpus)
    num_on = Counter(plan.devices)
    assert len(num_on) == min(num_ranks, num_gpus)
    assert max(num_on.values()) - min(num_on.values()) <= 1, "GPUs get equally many ranks"
    assert plan.backend == ("nccl" if max(num_on.values()) == 1 else "gloo")


def test_ranks_are_on_gpus_again_once_they_stand_for_no_devices():
    measured = replace(ClusterSpec(devices="8"), num_ranks=2, devices="")
    assert placed(measured, 4).devices == ("cuda:0", "cuda:1")
    assert placed(ClusterSpec(num_ranks=2, num_threads=5), 0).num_threads == 5


def test_a_hub_sets_limits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DDPNB_MAX_RANKS", "1")
    monkeypatch.setenv("DDPNB_MAX_THREADS", "2")
    assert placed(ClusterSpec(), 0).num_ranks == 1
    assert placed(ClusterSpec(num_threads=5), 0).num_threads == 2
    for choices in ({"num_ranks": 2}, {"devices": "8"}):
        with pytest.raises(UserError, match=r"too many\. DDPNB_MAX_RANKS allows at most 1\."):
            ClusterSpec(**choices)
    with pytest.raises(UserError, match="DDPNB_MAX_RANKS"):
        on_hosts(0, 0)
    monkeypatch.setenv("DDPNB_MAX_RANKS", "few")
    with pytest.raises(UserError, match="DDPNB_MAX_RANKS takes a whole number, not 'few'"):
        ClusterSpec()


SET_BY_TORCHRUN = {
    *("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "ROLE_NAME", "OMP_NUM_THREADS"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
}


def test_the_environment_is_torchruns():
    spec = ClusterSpec(num_ranks=3, num_threads=2)
    plan = place_ranks(spec, [Host(num_cores=2)], 4242)
    environment = torchrun_environment(plan, 2)
    expected = {"ACCELERATE_USE_CPU": "true", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert environment | expected == environment
    assert set(environment) >= SET_BY_TORCHRUN


def test_across_hosts_ranks_are_counted_on_each_one_anew():
    hosts = [Host(name=name, num_cores=2, size=size) for name, size in (("a", 2), ("b", 1))]
    plan = place_ranks(ClusterSpec(), hosts)
    found = [torchrun_environment(plan, rank) for rank in range(3)]
    assert [each["LOCAL_RANK"] for each in found] == ["0", "1", "0"]
    assert [each["GROUP_RANK"] for each in found] == ["0", "0", "1"]
    assert [each["LOCAL_WORLD_SIZE"] for each in found] == ["2", "2", "1"]


def on_hosts(*num_gpus: int, **choices: str) -> Placement:
    """Place three ranks on each host."""
    hosts = [
        Host(name=f"h{number}" * (len(num_gpus) > 1), num_cores=2, num_gpus=num, size=3)
        for number, num in enumerate(num_gpus)
    ]
    return place_ranks(ClusterSpec(**choices), hosts)


@pytest.mark.parametrize(
    ("num_gpus", "choices", "sentence"),
    [
        ([0], {"device": "cuda"}, r"This machine has no GPU with CUDA. Use --device cpu\.$"),
        ([0], {"backend": "nccl"}, "This machine has 0 GPUs"),
        ([2], {"backend": "nccl"}, "has 2 GPUs for 3 ranks"),
        ([3, 0], {"device": "cuda"}, "Host h1 has no GPU with CUDA. Use --device cpu, or remove"),
        ([3, 0], {}, "Host h1 has no GPU"),
        ([3, 2], {"backend": "nccl"}, "Host h1 has 2 GPUs for 3 ranks"),
    ],
)
def test_a_machine_with_fewer_gpus_than_asked_is_named(num_gpus, choices, sentence):
    with pytest.raises(UserError, match=sentence):
        on_hosts(*num_gpus, **choices)


def test_hosts_share_their_gpus_as_one_host_does():
    assert on_hosts(3, 3).backend == "nccl"
    plan = on_hosts(3, 2)
    assert plan.backend == "gloo"
    assert plan.devices[3:] == ("cuda:0", "cuda:1", "cuda:0")

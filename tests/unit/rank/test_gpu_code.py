"""What the code for GPUs does, as far as a machine without a GPU can show it."""

import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import backend_registration

from ddpnb.cluster.placement import ClusterSpec, Host, place_ranks, torchrun_environment
from ddpnb.compat import torch_internals
from ddpnb.protocol.errors import UserError
from ddpnb.rank import variables
from ddpnb.rank.group import gpu_software
from ddpnb.rank.script import names, plain
from ddpnb.rank.strategies import data_parallel
from ddpnb.rank.tasks.base import CLASSIFY
from ddpnb.rank.worker import Batch, Worker
from tests.rank.runs import spec_of

DEVICE = '''
import numpy as np, os, torch
from types import SimpleNamespace
from torch import nn
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("npy")


class Array(torch.Tensor):
    """A tensor of float32 on a device that computes with numpy."""

    @staticmethod
    def __new__(cls, values):
        made = torch._C._acc.create_empty_tensor(values.shape, torch.float32)
        made.__class__ = cls
        return made

    def __init__(self, values):
        self.values = values


def in_place(a, values):
    np.copyto(a.values, values)
    return a


library = torch.library.Library("aten", "IMPL")
for name, kernel in {
    "detach": lambda a: Array(a.values),
    "mul.Tensor": lambda a, b: Array(a.values * b.values),
    "add.Tensor": lambda a, b, alpha=1: Array(a.values + alpha * b.values),
    "add_.Tensor": lambda a, b, alpha=1: in_place(a, a.values + alpha * b.values),
    "cat": lambda tensors, dim=0: Array(np.concatenate([a.values for a in tensors])),
    "split_with_sizes": lambda a, sizes, dim=0: list(map(Array, np.split(a.values, sizes[:1]))),
    "new_empty_strided": lambda a, size, stride, **_: Array(np.empty(size, np.float32)),
    "copy_": lambda a, b, non_blocking=False: in_place(a, b.values),
}.items():
    library.impl(name, kernel, "PrivateUse1")


def full(number):
    return Array(np.full(2, number, np.float32))
'''
STEP = """
from ddpnb.rank.clock import Clock
from ddpnb.rank.strategies.data_parallel import ThreadReplicas

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(full(3))
    def forward(self, inputs):
        return self.weight * inputs

worker = SimpleNamespace(
    model=Scale(), make_model=Scale, device=torch.device("npy"), world_size=2, clock=Clock(),
    parameters=[],
)
replicas = ThreadReplicas(worker)
outputs = [each.model(full(n)) for n, each in enumerate(replicas.replicas, start=1)]
loss = replicas.gathered(outputs)
(loss * loss).backward(Array(np.ones(4, np.float32)))
print(worker.model.weight.grad.values.tolist(), flush=True)
os._exit(0)  # torch's thread for a device in Python may abort the process at a usual exit
"""


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this version of torch has no devices in Python",
)
def test_the_backward_pass_of_replicas_that_share_a_gpu_ends():
    """Autograd has one thread for a GPU. A hook on this thread must not wait for another thread."""
    words = [sys.executable, "-c", DEVICE + STEP]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "[30.0, 30.0]\n"  # the sum of 2 * 3 x^2 over x = 1 and 2


def one_after_the_other(_, replicas, inputs, kwargs):
    """Run the replicas as ``parallel_apply`` does on threads."""
    assert len(replicas) == len(inputs) == len(kwargs)
    return [each(*given) for each, given in zip(replicas, inputs, strict=True)]


@pytest.mark.parametrize("step", [CLASSIFY, lambda model, batch: model(batch[0]).square().mean()])
@pytest.mark.parametrize("num_samples", [1, 5, 6])
def test_torchs_data_parallel_gets_slices_and_sums_gradients(monkeypatch, step, num_samples):
    """Replaces only the functions of torch that need GPUs."""
    module = importlib.import_module("torch.nn.parallel.data_parallel")
    monkeypatch.setattr(module, "_get_available_device_type", lambda: "cuda")
    monkeypatch.setattr(module, "_get_device_index", lambda device, _: device.index)
    monkeypatch.setattr(module, "_check_balance", lambda _: None)
    monkeypatch.setattr(nn.DataParallel, "replicate", lambda _, model, ids: [model for _ in ids])
    monkeypatch.setattr(nn.DataParallel, "parallel_apply", one_after_the_other)
    monkeypatch.setattr(data_parallel, "gather", lambda outputs, _: torch.cat(outputs))
    monkeypatch.setattr(data_parallel, "moved", lambda tree, gpu: tree)
    gpus = [torch.device("cuda", index) for index in range(3)]
    monkeypatch.setattr(data_parallel, "_gpus", lambda *_: gpus)
    model = nn.Linear(4, 2)
    worker = Worker(
        model=model,
        make_model=lambda: nn.Linear(4, 2),
        training_step=step,
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        device=torch.device("cpu"),
        rank=0,
        world_size=3,
        local_world_size=3,
        num_shards=1,
        num_steps=1,
        folder=Path(),
        name="",
    )
    tree = torch.randn(num_samples, 4), torch.arange(num_samples) % 2
    expected = torch.autograd.grad(step(model, tree), [*model.parameters()])
    strategy = data_parallel.DataParallel()
    strategy.setup(worker)
    strategy.replicas.src_device_obj = torch.device("cpu")
    strategy.step(Batch(tree=tree, num_samples=num_samples, num_global=num_samples))
    for gradient, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


DRIVERS = {
    "NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023": "535.104.05",
    "NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build  (u)": "570.133.20",
    "": "",
}
"""The first lines of ``/proc/driver/nvidia/version``, and the driver's versions."""


@pytest.mark.parametrize("line", DRIVERS)
def test_the_software_of_a_gpu_is_named(tmp_path: Path, monkeypatch, line: str):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    if line:
        file = tmp_path / "proc/driver/nvidia/version"
        file.parent.mkdir(parents=True)
        file.write_text(f"NVRM version: {line}\nGCC version:  gcc version 11.4.0 (Ubuntu)\n")
    driver = f", driver {DRIVERS[line]}" * bool(line)
    assert gpu_software(tmp_path) == f"CUDA 13.0, NCCL 2.28.9{driver}"


def test_an_abort_reaches_the_backend_inside_the_wrapper_of_check():
    """In torch 2.11, ``abort`` and ``shutdown`` of the wrapper do nothing."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.new_group([0])
        found = [type(each).__name__ for each in torch_internals.abortable()]
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(before)
    assert found == ["ProcessGroupGloo"] * 2


@pytest.mark.parametrize("num_gpus", range(5))
@pytest.mark.parametrize("num_ranks", range(1, 5))
def test_a_script_places_its_ranks_as_a_cluster_does(monkeypatch, num_ranks: int, num_gpus: int):
    host = Host(num_cores=2, num_gpus=num_gpus)
    placed, chosen = place_ranks(ClusterSpec(num_ranks=num_ranks), [host]), []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "init_process_group", chosen.append)
    for rank, expected in enumerate(placed.devices):
        chosen.clear()
        monkeypatch.setattr(os, "environ", torchrun_environment(placed, rank))
        kind = plain.join_group()
        found = ":".join([kind, *map(str, chosen[1:])])
        assert (found, chosen[0] or "nccl") == (expected, placed.backend)
        assert str(importlib.reload(names).device) == expected


def test_a_checkpoint_restores_the_random_numbers_of_the_gpus(monkeypatch, tmp_path: Path):
    gpus = [torch.Generator() for _ in range(2)]  # as if they drew their numbers on two GPUs

    def restore(states: list[torch.Tensor]) -> None:
        for gpu, state in zip(gpus, states, strict=True):
            gpu.set_state(state)

    def drawn() -> list[float]:
        return [torch.rand(1, generator=each).item() for each in (torch.default_generator, *gpus)]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [g.get_state() for g in gpus])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restore)
    monkeypatch.setattr(plain, "CHECKPOINT", str(tmp_path / "train.pt"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain.save_checkpoint(7, nn.Linear(2, 2))
        before = drawn()
        assert plain.load_checkpoint(nn.Linear(2, 2)) == 7
    finally:
        dist.destroy_process_group()
    assert drawn() == before


def test_a_kept_model_is_a_copy_and_one_that_cannot_be_pickled_is_named():
    model, spec = nn.Linear(300, 200), spec_of("ddp", comparison_id="kept")
    weight = model.weight.detach().clone()
    variables.keep_model(spec, model)
    with torch.no_grad():
        model.weight.zero_()
    assert torch.equal(variables.trained_model("run-1").weight, weight)
    model.lock = threading.Lock()
    variables.keep_model(spec, model)
    with pytest.raises(UserError, match=r"cannot be pickled \(TypeError: .*lock"):
        variables.trained_model("run-1")
    with pytest.raises(UserError, match="does not have this model"):
        variables.trained_model("run-2")

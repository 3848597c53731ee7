"""Cells and scripts in the style of PyTorch's tutorials and examples, unchanged on the ranks."""

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.rig import ALL_REDUCE
from tests.compat.conftest import Run
from tests.kernel.client import both

SCRIPT = '''"""Usage: torchrun --nproc-per-node 2 train.py --epochs 3"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(size, 6, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.inputs[index].sin().sum(0, keepdim=True)


class Trainer:
    def __init__(self, model, loader, optimizer, save_every, path):
        self.rank = int(os.environ["LOCAL_RANK"])
        self.model = DDP(model)
        self.loader, self.optimizer = loader, optimizer
        self.save_every, self.path = save_every, path
        self.first = 0
        if os.path.exists(path):
            snapshot = torch.load(path, weights_only=True)
            self.model.module.load_state_dict(snapshot["model"])
            self.first = snapshot["epoch"] + 1

    def run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for inputs, targets in self.loader:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
        return loss.detach()

    def train(self, epochs):
        for epoch in range(self.first, epochs):
            loss = self.run_epoch(epoch)
            dist.all_reduce(loss)
            if self.rank == 0:
                print(f"epoch {epoch} loss {loss.item() / dist.get_world_size():.6f}")
                if epoch % self.save_every == 0:
                    torch.save({"model": self.model.module.state_dict(), "epoch": epoch}, self.path)
        dist.barrier()


def main():
    parser = argparse.ArgumentParser(description="a job")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--snapshot", default="snapshot.pt")
    args = parser.parse_args()
    dist.init_process_group(backend="gloo")
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    dataset = Waves(96)
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    Trainer(model, loader, optimizer, args.save_every, args.snapshot).train(args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''


def epochs_in(text: str) -> list[str]:
    return [line[line.index("epoch") :] for line in text.splitlines() if "epoch " in line]


def test_a_script_gives_the_same_as_under_torchrun(run: Run, folder: Path):
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    alone = subprocess.run(
        [*command, "--nproc-per-node=2", "train.py", "--epochs=3", "--snapshot=alone.pt"],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    here = run("%ddp_run train.py --epochs 3 --snapshot here.pt")
    assert epochs_in(here.stdout) == epochs_in(alone.stdout)
    assert len(epochs_in(here.stdout)) == 3
    resumed = run("%ddp_run train.py --epochs 4 --snapshot here.pt")
    assert [line.split()[1] for line in epochs_in(resumed.stdout)] == ["1", "2", "3"]


FSDP = """%%ddp
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]
model = nn.Sequential(*blocks, nn.Linear(8, 1))
mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shards",))
for block in blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(rank))
for _ in range(20):
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
weight = model[0][0].weight
print(isinstance(model, FSDPModule), tuple(weight.shape), tuple(weight.to_local().shape))
"""


def test_fsdp2_shards_and_trains(run: Run):
    assert run(FSDP).by_rank == both("True (8, 8) (4, 8)")
    later = run("%%ddp\nprint(len(whole), model(inputs).shape, loss.item() > 0)")
    assert "torch.Size([16, 1]) True" in later.by_rank[1][0]


TENSOR_PARALLEL = """%%ddp
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return self.down(self.up(x).relu())

torch.manual_seed(1)
alone = FeedForward()
torch.manual_seed(1)
mesh = init_device_mesh("cpu", (world_size,))
split = parallelize_module(
    FeedForward(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
)
x = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, split)]
for _ in range(3):
    for m, optimizer in zip((alone, split), optimizers):
        m(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(tuple(split.up.weight.to_local().shape), torch.allclose(alone(x), split(x), atol=1e-6))
rows = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
print(rows.to_local().shape[0], rows.redistribute(mesh, [Replicate()]).sum().item())
"""


def test_tensor_parallel_computes_what_one_process_does(run: Run):
    assert run(TENSOR_PARALLEL).by_rank == both("(6, 6) True", "2 28.0")


RPC = """%%ddp
import socket, threading
import torch, torch.distributed as dist
import torch.distributed.rpc as rpc

lock, weights, num_updates = threading.Lock(), torch.zeros(3, 1), 0

def pull():
    with lock:
        return weights.clone()

def push(gradient):
    global num_updates
    with lock:
        weights.sub_(0.1 * gradient)
        num_updates += 1
        return num_updates

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = [free.getsockname()[1]]
dist.broadcast_object_list(port, src=0)
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size,
             rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                 init_method=f"tcp://127.0.0.1:{port[0]}", rpc_timeout=20))
if rank > 0:
    truth = torch.tensor([[1.0], [2.0], [3.0]])
    for _ in range(60):
        x = torch.randn(16, 3)
        pulled = rpc.rpc_sync("worker0", pull).requires_grad_()
        (x @ pulled - x @ truth).square().mean().backward()
        count = rpc.rpc_sync("worker0", push, (pulled.grad,))
    print(count, torch.allclose(rpc.rpc_sync("worker0", pull), truth, atol=0.1))
rpc.shutdown()
"""


def test_a_parameter_server_over_rpc_trains_and_leaves_the_ranks_usable(run: Run):
    """Twice, so without remote references: in torch 2.13 no process holds any after a shutdown."""
    for _ in range(2):
        assert run(RPC).by_rank[1] == ["60 True"]
        cell = run(f"%%ddp\n{ALL_REDUCE}\ntotal.item()")
        assert cell.by_rank == both("2.0")
    assert "async" in run("%ddp_compare async --task digits --epochs 1 --no-baseline").text

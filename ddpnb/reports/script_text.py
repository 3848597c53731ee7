"""The text of the script that a comparison's cell becomes, up to its training (kernel).

A line that ends in ``#? tag`` is written only where the tag holds, ``#? !tag`` only where it does
not, ``#? one two`` where either holds.  ``#? tag {`` and ``#? }`` enclose lines of this kind.
Names after a ``$`` are filled in.
"""

IMPORTS = """\
import argparse
import inspect  #? optimizer zero
import math
import os
import pickle
import random
import sys
from collections.abc import Mapping
from contextlib import nullcontext  #? accumulate
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
#? fp16 {
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
#? }
#? bf16 {
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
#? }
#? fsdp {
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
#? }
from torch.distributed.optim import ZeroRedundancyOptimizer  #? zero
from torch.nn.parallel import DistributedDataParallel  #? ddp zero
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler
"""

BEGINNING = '''\
"""Train the model of the comparison $name by $about.

$commands
$notes"""

$imports

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--epochs", type=float, default=$num_epochs)
parser.add_argument("--batch-size", type=int, default=$batch_size, help="of all processes together")
parser.add_argument("--lr", type=float, default=$learning_rate)  #? !optimizer
parser.add_argument("--momentum", type=float, default=$momentum)  #? !optimizer
parser.add_argument("--seed", type=int, default=$seed)
#? accumulate {
parser.add_argument("--accumulate", type=int, default=$accumulate, help="parts of each batch")
#? }
#? clip {
parser.add_argument("--clip", type=float, default=$clip, help="largest norm of all gradients")
#? }
parser.add_argument("--every", type=int, default=$every, help="steps between averages")  #? local
parser.add_argument("--data-workers", type=int, default=$num_data_workers)
parser.add_argument("--checkpoint", default=$checkpoint, help="in a folder that all hosts see")
parser.add_argument("--save-every", type=float, default=$save_every, help="epochs")
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if any")
parser.add_argument("--log-every", type=int, default=0, help="steps; by default a tenth of all")
args = parser.parse_args()
if min(args.epochs, args.batch_size, args.save_every) <= 0:
    parser.error("--epochs, --batch-size and --save-every must be above 0")
MAX_EVALUATED = 10_000  # samples of a split that the trained model is measured on


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


seed_everything(args.seed)
$rank_names
# ---- the notebook's cell -----------------------------------------------------------------

$cell

# ---- samples -----------------------------------------------------------------------------


class Rows(Dataset):
    """Samples held in a tensor, or in a dict or tuple of tensors: one row for each."""

    def __init__(self, tree):
        self.tree = mapped(torch.as_tensor, tree)
        sizes = []
        mapped(lambda leaf: sizes.append(len(leaf)), self.tree)
        self.size = sizes[0]

    def __len__(self):
        return self.size

    def __getitems__(self, numbers):
        return mapped(lambda leaf: leaf[numbers], self.tree)


def mapped(function, tree):
    """Return a dict or tuple, nested in any way, with a function of each of its parts."""
    if isinstance(tree, Mapping):
        return {key: mapped(function, each) for key, each in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [mapped(function, each) for each in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return function(tree)


def to_device(batch, device):
    if hasattr(batch, "to"):
        return batch.to(device)
    return mapped(lambda each: each.to(device) if hasattr(each, "to") else each, batch)


def load_split(split):
    """Return a split's samples, and what makes a batch of them; None: torch's own."""
    made, collate = data(split), $collate
    if isinstance(made, DataLoader):
        made, collate = made.dataset, collate or made.collate_fn
    if isinstance(made, (torch.Tensor, np.ndarray, Mapping, tuple)):
        return Rows(made), lambda batch: batch
    return made, collate


def batches_from(samples, collate, numbers):
    """Return what yields a batch for each list of sample numbers."""
    return DataLoader(
        samples,
        batch_sampler=numbers,
        collate_fn=collate,
        num_workers=args.data_workers,
        generator=torch.Generator().manual_seed(args.seed),  # leaves the other random numbers alone
    )


# ---- checkpoints -------------------------------------------------------------------------


def random_state():
    kind, keys, *rest = np.random.get_state()
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["numpy"] = (kind, keys.tolist(), *rest)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state):
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def save_checkpoint(step, epoch, net, optim, scheduler):
    """Have rank 0 write all that a restart needs; takes part: every rank.

    The file is replaced at once: whoever reads it finds the old one or the new one, whole.
    """
    mine = {"random": random_state()}
    mine |= {"model": net.state_dict(), "optimizer": optim.state_dict()}  #? local
    ranks = [None] * dist.get_world_size()
    dist.gather_object(mine, ranks if dist.get_rank() == 0 else None)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)  #? fsdp
    weights, state = get_state_dict(net, optim, options=options)  #? fsdp
    optim.consolidate_state_dict(to=0)  #? zero
    if dist.get_rank() == 0:
        weights, state = net.state_dict(), optim.state_dict()  #? !fsdp
        saved = {"step": step, "epoch": epoch, "model": weights, "optimizer": state, "ranks": ranks}
        saved["scheduler"] = scheduler.state_dict() if scheduler is not None else None
        Path(args.checkpoint).parent.mkdir(parents=True, exist_ok=True)
        torch.save(saved, f"{args.checkpoint}.tmp")
        os.replace(f"{args.checkpoint}.tmp", args.checkpoint)


def load_checkpoint(net, optim, scheduler):
    """Return the step to go on from, with everything as it was then; 0 without a checkpoint."""
    path, rank, world_size = Path(args.checkpoint), dist.get_rank(), dist.get_world_size()
    saved = None
    starts = [None] * world_size  # of each host: one counts only the restarts that it caused
    dist.all_gather_object(starts, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))
    if args.resume or max(starts) > 0:
        try:
            saved = torch.load(path, "cpu", weights_only=True) if path.exists() else None
        except (pickle.UnpicklingError, RuntimeError, EOFError):
            sys.exit(f"{path} is no checkpoint of this script.")
    elif path.exists():
        sys.exit(f"{path} is there already: --resume goes on from it, --checkpoint names another.")
    steps = [None] * world_size
    dist.all_gather_object(steps, saved["step"] if saved else 0)
    if len(set(steps)) > 1:
        sys.exit(f"The hosts see different files at {path}: --checkpoint needs a shared folder.")
    if saved is None:
        if args.resume and rank == 0:
            print(f"there is no {path} yet: starting at the beginning", flush=True)
        return 0
    #? local {
    if len(saved["ranks"]) != world_size:
        sys.exit(f"{path} has the weights of {len(saved['ranks'])} processes: start as many.")
    saved |= saved["ranks"][rank]
    #? }
    #? fsdp {
    set_state_dict(
        net,
        optim,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )
    #? }
    net.load_state_dict(saved["model"])  #? !fsdp
    optim.load_state_dict(saved["optimizer"])  #? !fsdp
    if scheduler is not None:
        scheduler.load_state_dict(saved["scheduler"])
    if rank < len(saved["ranks"]):
        set_random_state(saved["ranks"][rank]["random"])
    if rank == 0:
        print(f"going on after step {saved['step']}, from {path}", flush=True)
    return saved["step"]
'''

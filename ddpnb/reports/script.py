"""The cell of a comparison as a script for torchrun (kernel).

The script needs only torch and trains as ``ddp`` did: the same initial weights, the same
samples in the same order, the same steps.
"""

import ast
import builtins
import symtable
from collections.abc import Iterator, Sequence
from string import Template

from ddpnb.history.comparison import Comparison, body_of, chosen
from ddpnb.protocol.catalogue import CELL_TASK, STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.notation import parse_strategy

CARRIED = ("num_epochs", "batch_size", "batch_per_worker", "learning_rate", "momentum", "seed")
"""Settings that the script has; its docstring names the others that were used."""

WRAPPED = {
    "bucket_cap_mb": "bucket_cap_mb",
    "bucket_view": "gradient_as_bucket_view",
    "static_graph": "static_graph",
    "find_unused_parameters": "find_unused_parameters",
}
"""Options of ``ddp`` that are arguments of ``DistributedDataParallel``, and their names there."""

RANK_NAMES = {
    "rank": 'int(os.environ["RANK"])',
    "local_rank": 'int(os.environ["LOCAL_RANK"])',
    "world_size": 'int(os.environ["WORLD_SIZE"])',
    "device": 'torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")',
}
"""What every rank's namespace holds, for a cell that uses it."""

SCRIPT = Template('''\
"""Train the model of the comparison $name with DistributedDataParallel.

    torchrun --nproc-per-node $num_ranks $file
$missing"""

import inspect
import os
import random
import sys
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

NUM_EPOCHS, BATCH_SIZE, SEED = $num_epochs, $batch_size, $seed
LEARNING_RATE, MOMENTUM = $learning_rate, $momentum
MAX_JUDGED = 10_000  # samples of a split that the trained model is measured on


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


seed_everything(SEED)
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

    def __getitem__(self, numbers):
        return mapped(lambda leaf: leaf[numbers], self.tree)


class Batches:
    """This rank's part of each global batch, as lists of sample numbers."""

    def __init__(self, num_samples):
        self.num_samples = num_samples
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        num_full, rest = divmod(num_samples, BATCH_SIZE)
        self.steps_per_epoch = num_full + (rest >= self.world_size)
        self.num_steps = max(1, round(NUM_EPOCHS * self.steps_per_epoch))

    def __len__(self):
        return self.num_steps

    def __iter__(self):
        for step in range(self.num_steps):
            epoch, batch = divmod(step, self.steps_per_epoch)
            if batch == 0:
                generator = torch.Generator().manual_seed((SEED * 1_000_003 + epoch) % 2**63)
                order = torch.randperm(self.num_samples, generator=generator)
            whole = order[batch * BATCH_SIZE : (batch + 1) * BATCH_SIZE]
            yield whole.tensor_split(self.world_size)[self.rank].tolist()

    def weight(self, step):
        """Return this rank's share of a step's global batch."""
        start = step % self.steps_per_epoch * BATCH_SIZE
        size = min(BATCH_SIZE, self.num_samples - start)
        least, num_larger = divmod(size, self.world_size)
        return (least + (self.rank < num_larger)) / size


def mapped(function, tree):
    """Return a dict or tuple, nested in any way, with a function of each of its parts."""
    if isinstance(tree, Mapping):
        return {key: mapped(function, each) for key, each in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [mapped(function, each) for each in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return function(tree)


def moved(batch, device):
    if hasattr(batch, "to"):
        return batch.to(device)
    return mapped(lambda each: each.to(device) if hasattr(each, "to") else each, batch)


def load(split):
    """Return a split, and what makes a batch of its items; None: torch's own."""
    made, collate = data(split), globals().get("collate_fn")
    if isinstance(made, DataLoader):
        made, collate = made.dataset, collate or made.collate_fn
    if isinstance(made, (torch.Tensor, np.ndarray, Mapping, tuple)):
        return Rows(made), None
    return list(made) if isinstance(made, IterableDataset) else made, collate


def loader(samples, collate, batches):
    """Return what yields a batch for each list of sample numbers."""
    generator = torch.Generator()  # leaves the other random numbers alone
    if isinstance(samples, Rows):
        return DataLoader(samples, sampler=batches, batch_size=None, generator=generator)
    return DataLoader(samples, batch_sampler=batches, collate_fn=collate, generator=generator)


# ---- training ----------------------------------------------------------------------------


def loss_of(net, batch):
    if globals().get("training_step"):
        result = training_step(net, batch)
        return result["loss"] if isinstance(result, Mapping) else result
    inputs, targets = batch
    return (globals().get("loss") or nn.functional.cross_entropy)(net(inputs), targets)


def make_optimizer(plain, batches):
    """Return the optimizer, its scheduler or None, and how many steps make one of the latter's."""
    parameters = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    if not globals().get("optimizer"):
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM), None, 1
    names = list(inspect.signature(optimizer).parameters)
    counted = {"num_steps": len(batches)} if "num_steps" in names else {}
    made = optimizer(plain if names[:1] == ["model"] else parameters, **counted)
    scheduler, every = None, 1
    if isinstance(made, Mapping):
        made, scheduler = made["optimizer"], made.get("lr_scheduler")
        if scheduler is not None and not isinstance(scheduler, Mapping):
            scheduler = {"scheduler": scheduler}
    elif isinstance(made, (tuple, list)) and len(made) == 2:
        made, scheduler = map(only, made)
    if isinstance(scheduler, Mapping):
        in_epochs = scheduler.get("interval", "epoch") == "epoch"
        every = scheduler.get("frequency", 1) * (batches.steps_per_epoch if in_epochs else 1)
        scheduler = scheduler["scheduler"]
    return only(made), scheduler, every


def only(made):
    return made[0] if isinstance(made, (tuple, list)) else made


def main():
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    train, held_out = load("train"), load("test")
    seed_everything(SEED)
    plain = model().to(device)
    seed_everything(SEED + 1 + dist.get_rank())  # dropout differs between ranks
    wrapped = DistributedDataParallel(plain, device_ids=[device] if on_gpu else None$ddp)
    batches = Batches(len(train[0]))
    optimize, scheduler, every = make_optimizer(plain, batches)

    for step, batch in enumerate(loader(*train, batches)):
        optimize.zero_grad()
        error = loss_of(wrapped, moved(batch, device))
        # DDP divides by the number of ranks; the weight makes that a mean over samples.
        (error * (dist.get_world_size() * batches.weight(step))).backward()
        optimize.step()
        if scheduler is not None and (step + 1) % every == 0:
            scheduler.step()
        if dist.get_rank() == 0 and step % max(1, len(batches) // 10) == 0:
            print(f"step {step + 1} of {len(batches)}: loss {error.item():.4f}", flush=True)

    if dist.get_rank() == 0:
        print(f"final training loss {judge(plain, *train, device)['loss']:.6f}")
        for name, value in judge(plain, *held_out, device, is_held_out=True).items():
            print(f"held-out {name} {value:.6f}")
    dist.destroy_process_group()


@torch.no_grad()
def judge(plain, samples, collate, device, is_held_out=False):
    """Return means over a split, in evaluation mode: the loss and what the cell measures."""
    plain.eval()
    num = min(len(samples), MAX_JUDGED)
    parts = [part.tolist() for part in (torch.arange(num) * len(samples) // num).split(512)]
    totals, outputs, targets = {}, [], []
    for part, batch in zip(parts, loader(samples, collate, parts)):
        batch, found = moved(batch, device), {}
        if is_held_out and globals().get("validation_step"):
            found = named(validation_step, validation_step(plain, batch))
        if "loss" not in found:
            with torch.enable_grad():
                found["loss"] = loss_of(plain, batch).item()
        for name, value in found.items():
            totals[name] = totals.get(name, 0.0) + float(value) * len(part)
        if is_held_out and globals().get("metric"):
            outputs.append(plain(batch[0]).cpu())
            targets.append(batch[1].cpu())
    means = {name: total / num for name, total in totals.items()}
    if outputs:
        means |= named(metric, metric(torch.cat(outputs), torch.cat(targets)))
    return means


def named(function, result):
    name = getattr(function, "__name__", type(function).__name__)
    return dict(result) if isinstance(result, Mapping) else {name: float(result)}


if __name__ == "__main__":
    main()
    # With gloo, torch sometimes aborts a process at its normal end ("terminate called without
    # an active exception"), and torchrun then reports a failure.
    sys.stdout.flush()
    os._exit(0)
''')


def script(comparison: Comparison, file: str) -> str:
    """Return the text of the script; ``file`` is its name.

    Raises:
        UserError: the comparison has no cell, or several, or one that only a notebook can run, or
            it trained with classes of the user's own alone.
    """
    specs = [run.spec for run in comparison.runs if run.spec] or list(comparison.specs)
    sources = dict.fromkeys(spec.source for spec in specs if spec.task == CELL_TASK)
    if len(sources) != 1:
        raise UserError(
            "A script is made of the cell of one %%ddp_compare: "
            f"{comparison.name} has {len(sources) or 'no'} such cell{'s' * (len(sources) > 1)}."
        )
    spec = _ddp_first(comparison, [spec for spec in specs if spec.task == CELL_TASK])
    cell = body_of(spec.source).strip()
    try:
        unknown = _unknown_names(cell)
    except SyntaxError as error:
        raise UserError(
            f"Line {error.lineno} of the cell is not plain Python: only a notebook can run it."
        ) from error
    if others := sorted(unknown - RANK_NAMES.keys()):
        raise UserError(
            f"The cell uses {others[0]}, which it does not define, and a script has nothing of "
            "other cells: import or define it in the cell."
        )
    return SCRIPT.substitute(
        name=comparison.name,
        file=file,
        num_ranks=num_ranks_of(comparison),
        missing=_missing(spec),
        num_epochs=repr(spec.num_epochs),
        batch_size=repr(spec.global_batch(num_ranks_of(comparison))),
        learning_rate=repr(spec.learning_rate),
        momentum=repr(spec.momentum),
        seed=repr(spec.seed),
        cell=cell,
        ddp="".join(
            f", {WRAPPED[name]}={value!r}" for name, value in _ddp_options(spec) if name in WRAPPED
        ),
        rank_names="".join(
            f"{name} = {value}\n"
            for name, value in RANK_NAMES.items()
            if name in unknown or (name == "local_rank" and "device" in unknown)
        ),
    )


def _unknown_names(cell: str) -> set[str]:
    """Return the names that a cell uses, and neither it nor the script's beginning defines.

    Raises:
        SyntaxError: it is not Python.
    """
    imported = SCRIPT.template.partition("import inspect")[2].partition("NUM_EPOCHS")[0]
    used: set[str] = set()
    bound = {"__name__", "__file__", *dir(builtins)}
    for source in (cell, f"import inspect{imported}"):
        tables = [symtable.symtable(source, "cell", "exec")]
        while tables:
            table = tables.pop()
            tables += table.get_children()
            for symbol in table.get_symbols():
                is_global = symbol.is_global() or table.get_type() == "module"
                if is_global and (symbol.is_assigned() or symbol.is_imported()):
                    bound.add(symbol.get_name())
                elif is_global and symbol.is_referenced():
                    used.add(symbol.get_name())
    has_star = any(
        isinstance(each, ast.ImportFrom) and each.names[0].name == "*"
        for each in ast.walk(ast.parse(cell))
    )
    return set() if has_star else used - bound


def _ddp_first(comparison: Comparison, specs: Sequence[RunSpec]) -> RunSpec:
    """Return the run whose options the script has: one of ``ddp``, if there is any."""
    built_in = [spec for spec in specs if parse_strategy(spec.strategy).name in STRATEGIES]
    if not built_in:
        raise UserError(
            f"A script trains with DistributedDataParallel, and {comparison.name} trained with "
            f"{parse_strategy(specs[0].strategy).name}, a class of your own: compare ddp, too."
        )
    return min(
        built_in, key=lambda spec: (parse_strategy(spec.strategy).name != "ddp", spec.strategy)
    )


def _ddp_options(spec: RunSpec) -> Iterator[tuple[str, object]]:
    """Yield the options of ``ddp`` that differ from its defaults."""
    choice = parse_strategy(spec.strategy)
    if choice.name == "ddp":
        options = STRATEGIES["ddp"].options
        yield from (each for each in choice.options.items() if each[1] != options[each[0]].default)


def num_ranks_of(comparison: Comparison) -> int:
    """Return how many ranks the script is for."""
    return max((run.header.num_workers for run in comparison.runs if run.header), default=2)


def _missing(spec: RunSpec) -> str:
    used = [option.flag for name, option in chosen(spec) if name not in (*CARRIED, "task")]
    used += [f"ddp:{name}={value}" for name, value in _ddp_options(spec) if name not in WRAPPED]
    return f"\nThe comparison also used {', '.join(used)}: this script does not.\n" if used else ""

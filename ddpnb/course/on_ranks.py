"""Exercises about code: checked on the ranks, all of which take part.  (On a rank.)"""

import copy
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpnb.course.exercises import HINTS, Check, Hint, expect
from ddpnb.course.exercises import check as check_variables

Model = nn.Module


def check(number: str, variables: dict[str, Any]) -> None:
    """Check an exercise on every rank; the twin of ``%ddp_exercise`` there.

    Raises:
        Hint: the solution is wrong.
        Exception: what the student's own code raised.
    """
    expect(dist.get_world_size() > 1, "it needs two ranks or more: %ddp_restart -n 2.")
    try:
        check_variables(CHECKS[number], variables)
    except (AttributeError, TypeError, ValueError) as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename != __file__:
            raise
        raise Hint(f"it does not return what it should ({error}). {HINTS[number]}") from None


# --- lesson 2: ranks and collectives


def send_around(send_around: Callable[[Tensor], Tensor]) -> None:
    """Each rank returns what its left neighbour passed in."""
    rank, size = _place()
    got = send_around(torch.full((1000,), float(rank)))
    expect(isinstance(got, Tensor), "return the tensor that has arrived.")
    left = float((rank - 1) % size)
    expect(bool((got == left).all()), f"rank {rank} should return what rank {left:g} sent.")


def sum_by_hand(sum_by_hand: Callable[[Tensor], Tensor]) -> None:
    """An all-reduce, built from other calls."""
    rank, size = _place()
    mine = torch.arange(5.0) + 10 * rank
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
        got = sum_by_hand(mine.clone())
    expect(not calls.called, "without dist.all_reduce: build it from other calls.")
    expected = size * torch.arange(5.0) + 10 * sum(range(size))
    expect(isinstance(got, Tensor), "return the sum.")
    expect(
        torch.allclose(got, expected), f"rank {rank} has {got.tolist()}, not {expected.tolist()}."
    )


# --- lesson 3: gradients averaged by hand


def average_gradients(average_gradients: Callable[[Model], None]) -> None:
    """After it every rank has the mean of all gradients."""
    _check_averaged(average_gradients)


def average_at_once(average_at_once: Callable[[Model], None]) -> None:
    """The same, with one all-reduce."""
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
        _check_averaged(average_at_once)
    expect(
        calls.call_count == 1,
        f"it calls all_reduce {calls.call_count} times; torch.cat makes one of them.",
    )


def _check_averaged(average: Callable[[Model], None]) -> None:
    rank, size = _place()
    model = _model()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(rank + number))
    average(model)
    mean = sum(range(size)) / size
    for number, parameter in enumerate(model.parameters()):
        found = parameter.grad
        if found is None:
            raise Hint("a gradient is gone: change p.grad in place.")
        is_own = torch.allclose(found, torch.full_like(found, float(rank + number)))
        expect(not is_own or rank == mean, f"rank {rank} still has its own gradient.")
        is_sum = torch.allclose(found, torch.full_like(found, size * (mean + number)))
        expect(not is_sum, "that is the sum of the gradients; DDP's update is their mean.")
        is_mean = torch.allclose(found, torch.full_like(found, mean + number))
        expect(is_mean, f"gradient {number} of rank {rank} is not the mean over the ranks.")


def my_indices(my_indices: Callable[[int, int], Sequence[int]]) -> None:
    """The samples of this rank in an epoch: disjoint, complete, another order each epoch."""
    num_samples, (_, size) = 10 * dist.get_world_size(), _place()
    orders = []
    for epoch in (0, 1, 0):
        mine = [int(index) for index in my_indices(num_samples, epoch)]
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, mine)
        dealt = sorted(index for part in parts for index in part)
        expect(
            len(dealt) == len(set(dealt)),
            f"in epoch {epoch} several ranks got the same sample: permute alike on all ranks "
            "(seed a generator), then take every N-th from this rank's place on.",
        )
        expect(dealt == list(range(num_samples)), f"in epoch {epoch} no rank got some samples.")
        orders.append(parts)
    expect(orders[0] == orders[2], "the same epoch has another order the next time: seed it.")
    expect(orders[0] != orders[1], "epochs 0 and 1 have the same order: the seed lacks the epoch.")


# --- lesson 4: inside DistributedDataParallel


def accumulate(accumulate: Callable[[Model, Sequence[Any], Callable[..., Tensor]], None]) -> None:
    """Several backward passes, one exchange, the gradient of the whole batch."""
    rank, _ = _place()
    model = _model()
    net = DistributedDataParallel(copy.deepcopy(model))
    exchanges: list[int] = []

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        exchanges.append(bucket.index())
        mean = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(mean, async_op=True)
        future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future

    net.register_comm_hook(None, hook)
    generator = torch.Generator().manual_seed(rank)
    batches = [
        (torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(3)
    ]
    accumulate(net, batches, nn.functional.cross_entropy)
    expect(bool(exchanges), "no gradient was exchanged: the last backward pass has to.")
    expect(exchanges.count(0) == 1, "each backward pass sends all gradients; only the last should.")
    reference = copy.deepcopy(model)
    inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
    nn.functional.cross_entropy(reference(inputs), targets).backward()
    for ours, theirs in zip(net.module.parameters(), reference.parameters(), strict=True):
        if theirs.grad is None or ours.grad is None:
            raise Hint("call backward() for each batch.")
        dist.all_reduce(theirs.grad)
        mean = theirs.grad / dist.get_world_size()
        is_sum = torch.allclose(ours.grad, 3 * mean, atol=1e-6)
        expect(not is_sum, "that is the gradient of the sum: divide each loss by len(batches).")
        expect(torch.allclose(ours.grad, mean, atol=1e-6), "the gradient is not that of one batch.")


def wrap(wrap: Callable[[Model], Model]) -> None:
    """DDP for a model of which each step uses only a part."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 1), nn.Linear(8, 1)

        def forward(self, x: Tensor, number: int) -> Tensor:
            head: nn.Module = (self.first, self.second)[number]
            return torch.as_tensor(head(x))

    net = wrap(TwoHeads())
    expect(isinstance(net, DistributedDataParallel), "return the wrapped model.")
    for step in range(3):
        net.zero_grad()
        net(torch.ones(2, 8), step % 2).sum().backward()


# --- lesson 5: asynchronous training


def step_size(step_size: Callable[[float, int], float]) -> None:
    """Staleness-aware learning rate: lr / max(1, staleness) (Zhang et al., IJCAI 2016)."""
    expect(step_size(0.1, 0) == 0.1, "a fresh gradient (staleness 0) has the whole rate.")
    expect(step_size(0.1, 1) == 0.1, "so has one of staleness 1.")
    expect(abs(step_size(0.1, 4) - 0.025) < 1e-9, "with staleness 4 a quarter of it is left.")


# --- lesson 6: less communication, less memory


def average_weights(average_weights: Callable[[Model], None]) -> None:
    """One average of local SGD: every rank has the mean of all weights."""
    rank, size = _place()
    model = _model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(rank))
    average_weights(model)
    mean = sum(range(size)) / size
    for parameter in model.parameters():
        expect(parameter.is_leaf, "the parameters have to stay parameters: change them in place.")
        expect(
            torch.allclose(parameter, torch.full_like(parameter, mean)),
            f"rank {rank} has {parameter.flatten()[0].item():g} in place of the mean, {mean:g}.",
        )


def sharded_adam(ShardedAdam: Callable[..., Any]) -> None:  # noqa: N803 - the student's class
    """Adam with its state shared out over the ranks: ZeRO, stage 1 (arXiv 1910.02054)."""
    rank, size = _place()
    layers = [nn.Linear(8, 8) for _ in range(2 * size)]
    torch.manual_seed(0)
    for layer in layers:
        layer.reset_parameters()
    model = nn.Sequential(*layers)
    reference = copy.deepcopy(model)
    ours, theirs = (
        ShardedAdam(list(model.parameters()), lr=0.01),
        torch.optim.Adam(reference.parameters(), lr=0.01),
    )
    for step in range(3):
        for net in (model, reference):
            net.zero_grad()
            net(torch.full((2, 8), 1.0 + step)).square().mean().backward()
        ours.step()
        theirs.step()
    for number, (mine, other) in enumerate(
        zip(model.parameters(), reference.parameters(), strict=True)
    ):
        expect(
            torch.allclose(mine, other, atol=1e-6),
            f"after three steps parameter {number} of rank {rank} is not what Adam makes of it: "
            "its owner has to broadcast it.",
        )
    states = [held for held in _tensors_of(ours) if held.numel() > 1]
    kept = sum(held.numel() for held in states)
    whole = 2 * sum(parameter.numel() for parameter in model.parameters())
    expect(
        kept <= whole * (1 / size + 0.1),
        f"rank {rank} keeps {kept / whole:.0%} of Adam's state; its own share is {1 / size:.0%}.",
    )


def _tensors_of(holder: Any) -> Iterator[Tensor]:
    """Yield the state of every optimizer that an object has, or is."""
    held = [holder, *vars(holder).values()]
    for optimizer in {id(each): each for each in held}.values():
        if isinstance(optimizer, torch.optim.Optimizer):
            for state in optimizer.state.values():
                yield from (each for each in state.values() if isinstance(each, Tensor))


# --- lesson 7: from the notebook to torchrun


def checkpoints(
    save_checkpoint: Callable[[str, Model, int], None],
    load_checkpoint: Callable[[str, Model], int],
) -> None:
    """A checkpoint that a killed rank cannot spoil; rank 0 writes, all ranks read."""
    rank, _ = _place()
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path, model = os.path.join(folder[0], "checkpoint.pt"), _model()
    expect(load_checkpoint(path, model) == 0, "without a file the first step is 0.")
    dist.barrier()
    with mock.patch.object(torch, "save", wraps=torch.save) as saved:
        save_checkpoint(path, model, 7)
    dist.barrier()
    wrote = [
        str(call.args[1] if len(call.args) > 1 else call.kwargs["f"]) for call in saved.mock_calls
    ]
    expect(rank == 0 or not wrote, f"rank {rank} writes the file too; one is enough.")
    expect(os.path.exists(path), "there is no file after save_checkpoint.")
    expect(path not in wrote, "a rank that is killed while it writes leaves half a file: rename.")
    other = _model(seed=1)
    expect(load_checkpoint(path, other) == 7, "load_checkpoint should return the step.")
    same = zip(model.parameters(), other.parameters(), strict=True)
    expect(all(torch.equal(a, b) for a, b in same), "the weights are not those that were saved.")


# --- lesson 8: what goes wrong


def evaluate_on_rank_0(evaluate_on_rank_0: Callable[..., Any]) -> None:
    """A forward pass of a DDP model on one rank alone, for which none waits."""
    rank, _ = _place()
    net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    loss = evaluate_on_rank_0(net, torch.ones(4, 8))
    expect(net.training, "leave the model as it was: net.train() after net.eval().")
    expect((loss is None) == (rank != 0), "rank 0 returns the mean, the others None.")
    net(torch.ones(4, 8)).sum().backward()


def even_batches(even_batches: Callable[[int, int], Sequence[Sequence[int]]]) -> None:
    """As many batches on every rank, where the samples do not divide evenly."""
    _, size = _place()
    for num_samples in (7 * size + 1, 8 * size):
        mine = [[int(index) for index in batch] for batch in even_batches(num_samples, 2)]
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, mine)
        counts = {len(part) for part in parts}
        expect(len(counts) == 1, f"of {num_samples} samples ranks make {sorted(counts)} batches.")
        seen = {index for part in parts for batch in part for index in batch}
        expect(len(seen) >= num_samples - 2 * size, "too many samples are left out.")
        expect(bool(seen) and max(seen) < num_samples, "there is no such sample.")


CHECKS: dict[str, Check] = {
    "2.1": send_around,
    "2.2": sum_by_hand,
    "3.1": average_gradients,
    "3.2": my_indices,
    "3.3": average_at_once,
    "4.1": accumulate,
    "4.2": wrap,
    "5.2": step_size,
    "6.1": average_weights,
    "6.2": sharded_adam,
    "7.2": checkpoints,
    "8.1": even_batches,
    "8.2": evaluate_on_rank_0,
}


def _place() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    return dist.get_rank(), dist.get_world_size()


def _model(seed: int = 0) -> Model:
    """Return a small model, the same on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))

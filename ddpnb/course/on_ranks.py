"""Checks of the exercises about code.  Every rank runs these checks.  Runs on the ranks."""

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

from ddpnb.course.exercises import Check, Hint, expect
from ddpnb.course.exercises import check as check_variables

Model = nn.Module


def check(number: str, variables: dict[str, Any]) -> None:
    """Check an exercise for ``%ddp_exercise``.  Every rank calls this function.

    Raises:
        Hint: the solution is wrong.
        Exception: the student's own code raised an error.
    """
    expect(dist.get_world_size() > 1, "The check needs 2 or more ranks. Run %ddp_restart -n 2.")
    try:
        check_variables(CHECKS_ON_RANKS[number], variables)
    except (AttributeError, TypeError, ValueError) as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename != __file__:
            raise
        raise Hint(f"The check cannot use the returned value: {error}.") from None


# --- lesson 2: ranks and collectives


def send_around(send_around: Callable[[Tensor], Tensor]) -> None:
    """Check that each rank returns the tensor of its left neighbour."""
    rank, size = _place()
    got = send_around(torch.full((1000,), float(rank)))
    expect(isinstance(got, Tensor), f"Return the tensor that arrived, not {got}.")
    left = float((rank - 1) % size)
    found = got.unique().tolist()
    expect(bool((got == left).all()), f"Rank {rank} must return {left:g}, but it returned {found}.")


def sum_by_hand(sum_by_hand: Callable[[Tensor], Tensor]) -> None:
    """Check an all-reduce that the student built from other calls."""
    rank, size = _place()
    mine = torch.arange(5.0) + 10 * rank
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
        got = sum_by_hand(mine.clone())
    expect(not calls.called, "Build the sum without dist.all_reduce.")
    expected = size * torch.arange(5.0) + 10 * sum(range(size))
    expect(isinstance(got, Tensor), f"Return the sum as a tensor, not {got}.")
    expect(torch.allclose(got, expected), f"Rank {rank} must return {expected}, not {got}.")


# --- lesson 3: gradients averaged by hand


def average_gradients(average_gradients: Callable[[Model], None]) -> None:
    """Check that every rank has the mean of all gradients."""
    _check_averaged(average_gradients)


def average_at_once(average_at_once: Callable[[Model], None]) -> None:
    """Check that every rank has the mean of all gradients after one all-reduce."""
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
        _check_averaged(average_at_once)
    expect(calls.call_count == 1, f"Call all_reduce once. You called it {calls.call_count} times.")


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
            raise Hint(f"On rank {rank}, p.grad is None for a parameter p.")
        is_own = torch.allclose(found, torch.full_like(found, float(rank + number)))
        expect(not is_own or rank == mean, f"Rank {rank} still has its own gradient, not the mean.")
        is_sum = torch.allclose(found, torch.full_like(found, size * (mean + number)))
        expect(not is_sum, "The result is the sum of the gradients. Compute the mean.")
        is_mean = torch.allclose(found, torch.full_like(found, mean + number))
        got = found.flatten()[0].item()
        expect(is_mean, f"The mean on rank {rank} must be {mean + number:g}, not {got:g}.")


def my_indices(my_indices: Callable[[int, int], Sequence[int]]) -> None:
    """Check that each sample goes to exactly one rank, in a different order in each epoch."""
    num_samples, (_, size) = 10 * dist.get_world_size(), _place()
    orders = []
    for epoch in (0, 1, 0):
        mine = [int(index) for index in my_indices(num_samples, epoch)]
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, mine)
        dealt = sorted(index for part in parts for index in part)
        again = sorted({index for index in dealt if dealt.count(index) > 1})
        expect(
            not again,
            f"In epoch {epoch}, the ranks get the samples {again} more than once. "
            "Rank r can take every N-th sample of the order, beginning with sample r.",
        )
        complete = dealt == list(range(num_samples))
        expect(complete, f"Use all {num_samples} samples in epoch {epoch}, not {dealt}.")
        orders.append(parts)
    expect(orders[0] == orders[2], "The order of epoch 0 must be the same in each call.")
    expect(orders[0] != orders[1], "Epochs 0 and 1 must have different orders.")


# --- lesson 4: inside DistributedDataParallel


def accumulate(accumulate: Callable[[Model, Sequence[Any], Callable[..., Tensor]], None]) -> None:
    """Check that gradients are correct and exchanged only once in several backward passes."""
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
    found = exchanges.count(0)
    expect(found == 1, f"Exchange gradients only once, in the last pass. Exchanges found: {found}.")
    reference = copy.deepcopy(model)
    inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
    nn.functional.cross_entropy(reference(inputs), targets).backward()
    for ours, theirs in zip(net.module.parameters(), reference.parameters(), strict=True):
        if theirs.grad is None or ours.grad is None:
            raise Hint("A parameter has no gradient. Call backward().")
        dist.all_reduce(theirs.grad)
        mean = theirs.grad / dist.get_world_size()
        is_sum = torch.allclose(ours.grad, 3 * mean, atol=1e-6)
        expect(not is_sum, "The gradients are added up. Compute the gradient of the mean loss.")
        is_mean = torch.allclose(ours.grad, mean, atol=1e-6)
        expect(is_mean, "The result is not the gradient of the mean loss of all batches.")


def wrap(wrap: Callable[[Model], Model]) -> None:
    """Check that DDP can train a model even if each step uses only a part of the model."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 1), nn.Linear(8, 1)

        def forward(self, x: Tensor, number: int) -> Tensor:
            head: nn.Module = (self.first, self.second)[number]
            return torch.as_tensor(head(x))

    net = wrap(TwoHeads())
    name = type(net).__name__
    expect(isinstance(net, DistributedDataParallel), f"Return a DDP model, not {name}.")
    for step in range(3):
        net.zero_grad()
        net(torch.ones(2, 8), step % 2).sum().backward()


# --- lesson 5: asynchronous training


def step_size(step_size: Callable[[float, int], float]) -> None:
    """Check that the learning rate is lr / max(1, staleness) (Zhang et al., IJCAI 2016)."""
    for staleness, rate in ((0, 0.1), (1, 0.1), (4, 0.025)):
        got = step_size(0.1, staleness)
        expect(abs(got - rate) < 1e-9, f"For staleness {staleness}, return {rate}, not {got}.")


# --- lesson 6: less communication, less memory


def average_weights(average_weights: Callable[[Model], None]) -> None:
    """Check that every rank has the mean of all weights after one averaging of local SGD."""
    rank, size = _place()
    model = _model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(rank))
    average_weights(model)
    mean = sum(range(size)) / size
    for parameter in model.parameters():
        expect(parameter.is_leaf, "Change each parameter in place. Do not replace the parameter.")
        is_mean, got = torch.allclose(parameter, torch.full_like(parameter, mean)), parameter.mean()
        expect(is_mean, f"The mean on rank {rank} must be {mean:g}, not {got:g}.")


def sharded_adam(ShardedAdam: Callable[..., Any]) -> None:  # noqa: N803 - the student's class
    """Check an Adam optimizer that shards its state over the ranks (ZeRO-1, arXiv 1910.02054)."""
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
            f"After three steps, parameter {number} on rank {rank} differs from Adam's result.",
        )
    states = [held for held in _tensors_of(ours) if held.numel() > 1]
    kept = sum(held.numel() for held in states)
    whole = 2 * sum(parameter.numel() for parameter in model.parameters())
    expect(
        kept <= whole * (1 / size + 0.1),
        f"Rank {rank} must keep {1 / size:.0%} of Adam's state, not {kept / whole:.0%}.",
    )


def _tensors_of(holder: Any) -> Iterator[Tensor]:
    """Yield the state tensors of all optimizers among ``holder`` and its attributes."""
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
    """Check that only rank 0 writes a checkpoint and renames it, and that all ranks load it."""
    rank, _ = _place()
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path, model = os.path.join(folder[0], "checkpoint.pt"), _model()
    step = load_checkpoint(path, model)
    expect(step == 0, f"Without a file, load_checkpoint must return 0, not {step}.")
    dist.barrier()
    with mock.patch.object(torch, "save", wraps=torch.save) as saved:
        save_checkpoint(path, model, 7)
    dist.barrier()
    wrote = [
        str(call.args[1] if len(call.args) > 1 else call.kwargs["f"]) for call in saved.mock_calls
    ]
    expect(rank == 0 or not wrote, f"Only rank 0 must write a file, but rank {rank} also wrote.")
    expect(os.path.exists(path), "save_checkpoint did not create the file.")
    expect(path not in wrote, "Write to another name first, not to the checkpoint itself.")
    other = _model(seed=1)
    step = load_checkpoint(path, other)
    expect(step == 7, f"load_checkpoint must return the saved step 7, not {step}.")
    same = zip(model.parameters(), other.parameters(), strict=True)
    expect(all(torch.equal(a, b) for a, b in same), "The loaded weights are not the saved weights.")


# --- lesson 8: what goes wrong


def evaluate_on_rank_0(evaluate_on_rank_0: Callable[..., Any]) -> None:
    """Check that rank 0 can evaluate a DDP model without the other ranks."""
    rank, _ = _place()
    net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    loss = evaluate_on_rank_0(net, torch.ones(4, 8))
    expect(net.training, "The model must be in training mode after the call. Call net.train().")
    expected = "None" if rank else "the mean"
    expect((loss is None) == (rank != 0), f"Rank {rank} must return {expected}, not {loss}.")
    net(torch.ones(4, 8)).sum().backward()


def even_batches(even_batches: Callable[[int, int], Sequence[Sequence[int]]]) -> None:
    """Check that all ranks have the same number of batches, for any number of samples."""
    _, size = _place()
    for num_samples in (7 * size + 1, 8 * size):
        mine = [[int(index) for index in batch] for batch in even_batches(num_samples, 2)]
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, mine)
        counts = sorted({len(part) for part in parts})
        expect(len(counts) == 1, f"Ranks must have the same number of batches, not {counts}.")
        seen = {index for part in parts for batch in part for index in batch}
        least, last = num_samples - 2 * size, max(seen, default=num_samples)
        expect(len(seen) >= least, f"Use {least} or more samples. You used {len(seen)}.")
        expect(last < num_samples, f"Sample {last} does not exist. Use 0 to {num_samples - 1}.")


CHECKS_ON_RANKS: dict[str, Check] = {
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
    """Return a small model that is the same on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))

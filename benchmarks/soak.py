"""Repeats faults many times and checks the promises: ``python -m benchmarks soak``, about 10 min.

- ``freed``: one rank raises while the others wait for it in one of six kinds of call.
- ``killed``: ranks are killed at random moments of a training, and restarted.

``soak:minutes=60`` is an hour of cells, comparisons, faults and restarts in two notebooks at once.
"""

import random
import re
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice

import psutil

from benchmarks.kernel import Kernel, kernel
from benchmarks.measure import Figure, pss
from ddpnb.cluster.call import CallEvent, Returned
from ddpnb.cluster.cluster import Cluster
from tests.cluster.rig import Ended, begin, finish, pull, run, started

SETUP = """
import time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
kept = [rank, 0]
"""
WAITS = {
    "all_reduce": "dist.all_reduce(torch.ones(1000))",
    "broadcast": "dist.broadcast(torch.ones(1000), src=culprit)",
    "barrier": "dist.barrier()",
    "recv": "dist.recv(torch.ones(1000), src=culprit)",
    "sub-group all_reduce": "dist.all_reduce(torch.ones(1000), group=pair)",
    "DDP backward": "net(torch.ones(1, 9)).sum().backward()",
}
"""Calls that wait for rank ``culprit``. All other ranks make the call."""
PREPARE = {
    "sub-group all_reduce": "pair = dist.new_group(list(range(world_size)))",
    "DDP backward": "net = DDP(nn.Linear(9, 9))",
}

NUM_ROUNDS = 100
NUM_KILLS = 20
KILLS = f"{NUM_KILLS} kills"
NAMED_SECONDS = 1.0
FREED_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """The result of one round."""

    wait: str
    named_after: float
    """Seconds from the exception on the rank until the notebook received it."""
    freed_after: float
    """Seconds from the exception until every rank had ended the cell."""
    next_is_right: bool
    """True if the all-reduce of the next cell gave the correct sum on all ranks."""
    is_kept: bool
    """True if all variables are unchanged."""
    ended: Ended


def one_raises(cluster: Cluster, wait: str, culprit: int, num_before: int = 0) -> Round:
    """Let rank ``culprit`` raise while the others wait for it in the call ``WAITS[wait]``.

    ``SETUP`` must have run.  A variable on the ranks counts the ``num_before`` earlier rounds.
    """
    named: list[float] = []

    def note(event: CallEvent) -> None:
        if isinstance(event, Returned) and event.rank == culprit:
            failure = event.value.failure
            named.append(time.time() - failure.failed_at)
            began.append(failure.failed_at)

    began: list[float] = []
    cell = begin(
        cluster,
        f"culprit = {culprit}\n{PREPARE.get(wait, '')}\n"
        f"if rank == culprit:\n    time.sleep(0.2)\n    raise ValueError('on purpose')\n"
        f"{WAITS[wait]}",
        on_event=note,
    )
    finish(cell)
    freed_after = time.time() - began[0]
    again = run(
        cluster,
        "total = torch.full((1000,), rank + 1.0)\ndist.all_reduce(total)\nkept[1] += 1",
    )
    num_ranks = len(cluster.ranks)
    expected = num_ranks * (num_ranks + 1) / 2
    totals = [] if again.failures else pull(cluster, "total.min().item(), total.max().item()")
    return Round(
        wait=wait,
        named_after=named[0],
        freed_after=freed_after,
        next_is_right=totals == [(expected, expected)] * num_ranks,
        is_kept=pull(cluster, "kept") == [[rank, num_before + 1] for rank in cluster.ranks],
        ended=cell,
    )


def measure(minutes: float = 0) -> list[Figure]:
    """Measure single faults, or with ``minutes`` random work and faults in two notebooks."""
    if minutes:
        return lasting(minutes)
    figures = []
    for num_ranks in (2, 3):
        figures += freed(num_ranks)
    return figures + killed()


def freed(num_ranks: int) -> list[Figure]:
    """Let a random rank raise under each kind of call in turn."""
    chance = random.Random(num_ranks)
    rounds: list[Round] = []
    with started(num_ranks) as cluster:
        run(cluster, SETUP)
        for num_before, wait in enumerate(islice(cycle(WAITS), NUM_ROUNDS)):
            rounds.append(one_raises(cluster, wait, chance.choice(cluster.ranks), num_before))
    of = f"{NUM_ROUNDS} rounds with {num_ranks} ranks"
    named = [each.named_after for each in rounds]
    ended = [each.freed_after for each in rounds]
    return [
        Figure(
            name=f"time to report the exception of a rank ({of})",
            unit="s",
            ours=named,
            limit="<= 1.0",
        ),
        Figure(name=f"time to release waiting ranks ({of})", unit="s", ours=ended, limit="<= 2.0"),
        Figure(
            name="number of rounds that meet all promises: exception reported within 1 s, ranks "
            f"released within 2 s, next all-reduce correct, variables kept ({of})",
            unit="rounds",
            ours=[sum(map(is_as_promised, rounds))],
            limit=f">= {len(rounds)}",
            note=", ".join(sorted({each.wait for each in rounds if not is_as_promised(each)})),
        ),
    ]


def is_as_promised(each: Round) -> bool:
    is_in_time = each.named_after <= NAMED_SECONDS and each.freed_after <= FREED_SECONDS
    return is_in_time and not each.ended.lost and each.next_is_right and each.is_kept


BUILD = textwrap.dedent(
    """
    %%ddp
    import time, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    plain = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    num_done, kept = torch.zeros(1), rank
    """
).lstrip()

TRAIN = textwrap.dedent(
    """
    %%ddp
    # A restarted rank gets the weights and the count from the rank that has made most steps.
    counts = [torch.zeros(1) for _ in range(world_size)]
    dist.all_gather(counts, num_done)
    source = int(torch.cat(counts).argmax())
    for tensor in [num_done, *plain.state_dict().values()]:
        dist.broadcast(tensor, source)
    net = DDP(plain)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range({num_steps}):
        sgd.zero_grad()
        net(torch.randn(32, 64)).square().mean().backward()
        sgd.step()
        num_done += 1
        time.sleep(0.005)
    """
).lstrip()

PROCESSES = """import json
from ddpnb.session.session import this_session
cluster = this_session()._cluster
print(json.dumps({"pids": [state.pid for state in cluster.states],
 "server": cluster.processes.server.pid}))
"""
DONE = """import json, ddpnb
print(json.dumps([int(n) for n in ddpnb.pull("num_done.item()").values()]))
"""

DEAD = """exits = cluster.exits.items()
print(json.dumps([[name, exit_.code, exit_.last_words] for name, exit_ in exits]))
"""


def killed() -> list[Figure]:
    """Kill random ranks while they train, restart them, and look for leaks."""
    chance = random.Random(0)
    reported, back, went_on = [], [], 0
    with kernel() as running:
        running.run("%load_ext ddpnb\n%ddp_start -n 3 --device cpu")
        running.run(BUILD)
        for _ in range(3):  # one-time allocations happen now
            kill_and_bring_back(running, 1)
        before = used(running)
        for _ in range(NUM_KILLS):  # rank 0 stays alive, so that a leak in it shows
            found = kill_and_bring_back(running, chance.choice((1, 2)))
            reported.append(found[0]), back.append(found[1])
            went_on += found[2]
        after = used(running)
        for _ in range(NUM_KILLS):
            found = kill_and_bring_back(running, chance.choice((0, 1, 2)))
            reported.append(found[0]), back.append(found[1])
            went_on += found[2]
        running.run("%ddp_stop")
    of = f"{2 * NUM_KILLS} random kills with 3 ranks"
    return [
        Figure(
            name=f"time from SIGKILL to the end of the cell ({of})",
            unit="s",
            ours=reported,
            limit="<= 2",
        ),
        Figure(name=f"time of %ddp_restart --ranks ({of})", unit="s", ours=back, limit="<= 3"),
        Figure(
            name="number of kills after which training continues and other ranks keep their "
            f"variables ({of})",
            unit="kills",
            ours=[went_on],
            limit=f">= {2 * NUM_KILLS}",
        ),
        growth(before, after),
    ]


def kill_and_bring_back(running: Kernel, victim: int) -> tuple[float, float, bool]:
    """Return the seconds until the cell ended, the restart's seconds, and True if all worked."""
    state, before = running.value(PROCESSES), running.value(DONE)
    killed_at: list[float] = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        psutil.Process(state["pids"][victim]).kill()

    timer = threading.Timer(random.uniform(0.3, 1.0), kill)
    timer.start()
    try:
        running.run(TRAIN.format(num_steps=100_000))
    except RuntimeError as error:
        is_named = re.search(rf"rank {victim} was killed by SIGKILL", str(error)) is not None
    else:
        is_named = False
    reported = time.monotonic() - killed_at[0]
    if len(dead := running.value(DEAD)) != 1:
        raise RuntimeError(f"rank {victim} was killed, but these processes died: {dead}")
    began = time.monotonic()
    running.run(f"%ddp_restart --ranks {victim}")
    back = time.monotonic() - began
    kept = running.run("%%ddp\nprint(f'{rank}:{globals().get(\"kept\")}')")
    others = [rank for rank in range(3) if rank != victim]
    are_kept = all(f"{rank}:{rank}" in kept for rank in others) and f"{victim}:None" in kept
    reached = max(
        running.value("import ddpnb, json\nprint(json.dumps([int(n) for n in "
                      f"ddpnb.pull('num_done.item()', ranks='{others[0]},{others[1]}').values()]))")
    )  # fmt: skip
    running.run(BUILD.replace("%%ddp", f"%%rank {victim}"))
    running.run(TRAIN.format(num_steps=5))
    done = running.value(DONE)
    goes_on = done == [reached + 5] * 3 and reached > max(before)
    return reported, back, is_named and are_kept and goes_on


MEET = "import torch.distributed as dist\n"
WORK = {
    "a cell": "%%ddp\nx = rank",
    "a comparison": "result = %ddp_compare ddp async --task digits --epochs 1",
    "a raise": f"%%ddp\n{MEET}if rank == 1: raise ValueError('on purpose')\ndist.barrier()",
    "a rank left out": f"%%ddp\n{MEET}if rank == 1: dist.barrier()",
    "a kill": f"%%ddp\nimport os\n{MEET}if rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()",
    "an interrupt": f"%%ddp\nimport time\n{MEET}if rank == 1: dist.barrier()\ntime.sleep(60)",
    "a restart": "%ddp_restart -n 2",
}
"""Typical work and faults. After each of them, the group works."""
NUM_WARM = 20
"""The number of comparisons after which a kernel has allocated all memory for plots and store."""
FAILS = ("a raise", "a rank left out", "a kill", "an interrupt")
SUM = f"%%ddp\nimport torch\n{MEET}total = torch.ones(1)\ndist.all_reduce(total)\nassert total == 2"


def lasting(minutes: float) -> list[Figure]:
    """Work in two notebooks at once, in a random order, and look for leaks."""
    with kernel() as one, kernel() as other:
        notebooks = (one, other)
        for running in notebooks:
            running.run("%load_ext ddpnb\n%ddp_start -n 2 --device cpu")
            for name in [*WORK, *["a comparison"] * NUM_WARM]:  # one-time allocations
                work(running, name)
        before = [used(running) for running in notebooks]  # after a restart, as at the end
        end = time.monotonic() + 60 * minutes
        with ThreadPoolExecutor(len(notebooks)) as pool:
            counts = list(pool.map(partial(work_until, end), notebooks, range(len(notebooks))))
        for running in notebooks:
            work(running, "a restart")
        after = [used(running) for running in notebooks]
        for running in notebooks:
            running.run("%ddp_stop")
    done = {name: sum(count[name] for count in counts) for name in WORK}
    figures = [growth(*each) for each in zip(before, after, strict=True)]
    said = ", ".join(f"{num} times {name}" for name, num in done.items())
    of = f"{minutes:g} minutes of work in two notebooks"
    name = f"number of actions after which a group works ({of})"
    return [
        Figure(name=name, unit="", ours=[sum(done.values())], note=said),
        *(replace(each, name=each.name.replace(KILLS, of)) for each in figures),
    ]


def work_until(end: float, running: Kernel, seed: int) -> Counter[str]:
    """Do random work until the time ``end``; return the count of each kind of work."""
    chance, done = random.Random(seed), Counter[str]()
    while time.monotonic() < end:
        name = chance.choice(list(WORK))
        work(running, name)
        done[name] += 1
    return done


def work(running: Kernel, name: str) -> None:
    """Do one kind of work, and check that a group works afterwards."""
    timer = threading.Timer(2, running.interrupt)
    if name == "an interrupt":
        timer.start()
    try:
        running.run(WORK[name])
    except RuntimeError:
        if name not in FAILS:
            raise
    if name == "a kill":
        running.run("%ddp_restart --ranks 1")
    running.run(SUM)


def used(running: Kernel) -> Mapping[str, float]:
    """Return the memory, descriptors and threads of the processes that live all the time."""
    state = running.value(PROCESSES)
    server = psutil.Process(state["server"])
    (controller,) = (
        child
        for child in server.children()
        if child.pid not in state["pids"] and child.status() != psutil.STATUS_ZOMBIE
    )
    processes = {
        "kernel": psutil.Process(server.ppid()),
        "fork server": server,
        "controller": controller,
        "rank 0": psutil.Process(state["pids"][0]),
    }
    everyone = [processes["kernel"], *processes["kernel"].children(recursive=True)]
    found: dict[str, float] = {
        "processes": len(everyone),
        "all processes together: MB (PSS)": sum(pss(process.pid) for process in everyone),
    }
    for name, process in processes.items():
        found[f"{name}: file descriptors"] = process.num_fds()
        found[f"{name}: threads"] = process.num_threads()
        found[f"{name}: MB (RSS)"] = process.memory_info().rss / 1e6
    return found


def growth(before: Mapping[str, float], after: Mapping[str, float]) -> Figure:
    """Return the count that has grown most."""
    most = max(before, key=lambda what: after[what] / before[what])
    counts = f"{len(before)} counts of processes, memory, threads and descriptors"
    return Figure(
        name=f"largest growth among {counts} ({KILLS})",
        unit="MB" if "MB" in most else "",
        ours=[after[most]],
        theirs=[before[most]],
        limit="<= 1.1",
        note=most,
    )

"""Measures a start on two hosts, and strategies on slow links between two hosts.

The hosts are two network namespaces with a real sshd each, from the tests; needs root.
``python -m benchmarks hosts:part=links`` and ``hosts:part=start`` measure one of the two.
"""

import contextlib
import io
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.claims import Unseen
from benchmarks.delayed import INTERFACE, delayed_link
from benchmarks.kernel import kernel
from benchmarks.measure import Figure, in_turns
from ddpnb.cluster.cluster import Cluster
from ddpnb.hosts.processes import start_cluster
from ddpnb.hosts.spec import HostsSpec
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.results.store import Store
from ddpnb.results.summary import samples_per_second
from ddpnb.session.comparison import check_across_hosts, prepare
from ddpnb.session.comparison_spec import ComparisonSpec
from tests.cluster.two_hosts import TwoHosts, call, two_hosts

SCRIPT = textwrap.dedent(
    """
    import time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        print(time.time(), flush=True)
    dist.destroy_process_group()
    """
)

STRATEGIES = ("ddp", "local-sgd", "diloco", "async")
RATES = {"1gbit": ("128kb", 96), "100mbit": ("32kb", 24)}
"""The burst size and the number of steps for each rate: more than the first few steps, but no more
than the slowest strategy makes in some seconds."""
DELAY = 0.01
"""The delay in seconds, each way."""
BATCH_SIZE = 64
NUM_FLOATS = 1_001_000
TASK = f"""
import torch
from torch import nn

def model():
    return nn.Linear(1000, 1000)

def data(split):
    torch.manual_seed(0)
    return torch.randn({BATCH_SIZE}, 1000), torch.randint(1000, ({BATCH_SIZE},))

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01)
"""
START = textwrap.dedent(
    """
    import json, time
    from IPython import get_ipython
    began = time.perf_counter()
    get_ipython().run_line_magic("ddp_start", "--hosts {hosts} --device cpu")
    get_ipython().run_cell_magic("ddp", "", "import torch.distributed as dist; dist.barrier()")
    took = time.perf_counter() - began
    get_ipython().run_line_magic("ddp_stop", "")
    print(json.dumps(took))
    """
)


def measure(part: str = "", rounds: int = 3, each: int = 2) -> list[Figure]:
    """Measure ``rounds`` repeats of each strategy, with ``each`` ranks on each host."""
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
        figures = []
        if part in ("", "start"):
            figures.append(start(hosts, rounds, each))
        if part in ("", "links"):
            figures += links(hosts, rounds, each)
        return figures


def start(hosts: TwoHosts, rounds: int, each: int) -> Figure:
    """Compare a start of ddpnb with a start of the same work under torchrun, both over ssh."""
    names = f"a:{each},b:{each}"

    def ours() -> float:
        with kernel() as fresh:
            fresh.run("%load_ext ddpnb")
            return float(str(fresh.value(START.format(hosts=names))))

    def theirs() -> float:
        return torchrun_seconds(hosts, each)

    found = in_turns(ours, theirs, 2 * rounds)
    return Figure(
        name=f"time of %ddp_start --hosts {names} and a first collective, compared with torchrun "
        "over ssh",
        unit="s",
        ours=found[0],
        theirs=found[1],
        limit="<= 0.8",
    )


def torchrun_seconds(hosts: TwoHosts, each: int) -> float:
    script = hosts.folder / "script.py"
    script.write_text(SCRIPT)
    began = time.time()
    started = [
        subprocess.Popen(
            ["ssh", host, torchrun_line(hosts, host, each, script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for host in "ab"
    ]
    texts = [process.communicate(timeout=120)[0] for process in started]
    return float("".join(texts).split()[-1]) - began


def torchrun_line(hosts: TwoHosts, host: str, each: int, script: Path) -> str:
    """Return the command that a user would write for two hosts with the same host name."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    words += ["--nproc-per-node", str(each), "--rdzv-backend", "c10d", "--rdzv-id", "start"]
    words += ["--rdzv-endpoint", f"{hosts.address('a')}:29400"]
    words += ["--local-addr", hosts.address(host), "--rdzv-conf", f"is_host={int(host == 'a')}"]
    return f"GLOO_SOCKET_IFNAME=net0 {shlex.join([*words, str(script)])}"


def links(hosts: TwoHosts, rounds: int, each: int) -> Iterator[Figure]:
    """Compare the strategies at each rate, without and with a delay."""
    names = [name for name in STRATEGIES if is_allowed(name)]
    spaces = (f"{hosts.prefix}a", f"{hosts.prefix}b")
    with delayed_link(spaces, subnet="10.77.1", seconds=DELAY):
        for interface, delay in (("net0", ""), (INTERFACE, f", {1e3 * DELAY:.0f} ms of delay")):
            ranks = f"a:{each},b:{each}"
            spec = HostsSpec(hosts=ranks, device="cpu", num_threads=1, interface=interface)
            cluster = start_cluster(spec)
            try:
                for rate, (burst, num_steps) in RATES.items():
                    with shaped(spaces, interface, rate, burst):
                        where = f"2 hosts of {each} ranks, {rate}{delay}"
                        yield from compared(cluster, names, num_steps, rounds, where)
            finally:
                cluster.stop()


def is_allowed(strategy: str) -> bool:
    """Return True if a strategy trains across hosts; if not, print the error."""
    try:
        check_across_hosts([strategy])
    except UserError as error:
        print(f"Skipped {strategy}: {error}")
        return False
    return True


@contextlib.contextmanager
def shaped(spaces: tuple[str, str], interface: str, rate: str, burst: str) -> Iterator[None]:
    """Limit the rate at which each host sends."""
    limit = ("root", "tbf", "rate", rate, "burst", burst, "limit", "4mb")
    for space in spaces:
        call("tc", "-n", space, "qdisc", "add", "dev", interface, *limit)
    try:
        yield
    finally:
        for space in spaces:
            call("tc", "-n", space, "qdisc", "delete", "dev", interface, "root")


def compared(
    cluster: Cluster, names: list[str], num_steps: int, rounds: int, where: str
) -> Iterator[Figure]:
    """Compare all strategies in turns; each repeat begins with a different strategy."""
    training = TrainingSpec(source=TASK, num_epochs=num_steps, batch_size=BATCH_SIZE, eval_every=0)
    spec = ComparisonSpec(
        strategies=tuple(names), training=training, num_repeats=rounds, baseline=False
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Store(Path(folder))) as store,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        runs = prepare(cluster, store, spec, Unseen()).run().comparison.runs
    rates: dict[str, list[float]] = {name: [] for name in names}
    for run in runs:
        assert run.spec is not None
        assert run.status == "finished", run
        rates[run.spec.strategy].append(samples_per_second(run))
    for name in names[1:]:
        yield Figure(
            name=f"samples/s of {name}, compared with ddp ({where}, a layer of "
            f"{NUM_FLOATS / 1e6:.0f} M floats)",
            unit="samples/s",
            ours=rates[name],
            theirs=rates["ddp"],
        )

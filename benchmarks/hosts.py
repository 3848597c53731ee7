"""Compares a start of ddpnb on two hosts with a start of ``torchrun`` on the same hosts.

The hosts are two network namespaces with a real sshd each, from the tests; needs root.
"""

import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from benchmarks.kernel import kernel
from benchmarks.measure import Figure, in_turns
from tests.cluster.two_hosts import TwoHosts, two_hosts

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


def measure(rounds: int = 6, each: int = 2) -> list[Figure]:
    """Measure ``rounds`` starts of each program, with ``each`` ranks on each host."""
    names = f"a:{each},b:{each}"
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:

        def ours() -> float:
            with kernel() as fresh:
                fresh.run("%load_ext ddpnb")
                return float(str(fresh.value(START.format(hosts=names))))

        found = in_turns(ours, lambda: torchrun_seconds(hosts, each), rounds)
    return [
        Figure(
            name=f"time of %ddp_start --hosts {names} and a first collective, compared with "
            "torchrun over ssh",
            unit="s",
            ours=found[0],
            theirs=found[1],
            limit="<= 0.8",
        )
    ]


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

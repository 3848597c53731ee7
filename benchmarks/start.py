"""From nothing to a finished all-reduce: ``%ddp_start`` against ``torchrun``."""

import json
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from benchmarks.kernel import kernel
from benchmarks.measure import Figure, in_turns

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

OURS = textwrap.dedent(
    """
    import json, time
    from IPython import get_ipython
    began = time.perf_counter()
    get_ipython().run_line_magic("ddp_start", "-n {n}")
    took = time.perf_counter() - began
    get_ipython().run_line_magic("ddp_stop", "")
    print(json.dumps(took))
    """
)


def torchrun_seconds(script: Path, n: int) -> float:
    began = time.time()
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={n}", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.strip().splitlines()[-1])) - began


def ddpnb_seconds(n: int) -> float:
    """Each start in a kernel of its own, as a user's first is: nothing imported yet."""
    with kernel() as fresh:
        fresh.run("%load_ext ddpnb")
        return float(fresh.value(OURS.format(n=n)))


def measure() -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        for n, rounds in ((2, 9), (8, 5)):
            ours, theirs = in_turns(
                lambda n=n: ddpnb_seconds(n), lambda n=n: torchrun_seconds(script, n), rounds
            )
            figures.append(
                Figure(
                    name=f"%ddp_start to a finished all-reduce, {n} ranks, against torchrun",
                    unit="s",
                    ours=ours,
                    theirs=theirs,
                    limit="<= 0.65",
                )
            )
    return figures

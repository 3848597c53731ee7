"""Defines the other tools that run a cell on several ranks, and how a user starts them.

Each peer has a separate environment in ``build/peers``, with the packages that pip installs for its
name.  All other packages come from the environment that runs the benchmark, so that all peers use
the same torch.
"""

import contextlib
import os
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from jupyter_client.manager import KernelManager

ENVIRONMENTS = Path("build/peers")
LIMIT_SECONDS = 30
"""The time limit for each measurement in seconds, the same for all peers."""
MARK = "DDPNB_BENCHMARK"
"""An environment variable that marks all processes of a notebook, whatever their parent is."""

FORM_GROUP = (
    "import torch, torch.distributed as dist\n"
    "if not dist.is_initialized(): dist.init_process_group('gloo')\n"
)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A tool, started as its documentation says."""

    name: str
    packages: tuple[str, ...] = ()
    load: str = "pass"
    """Prepares a new kernel before the ranks start, without importing torch."""
    begin: str = ""
    """Starts ``{n}`` ranks in the kernel."""
    cell: str = "{source}"
    """Runs ``{source}`` on all ranks, or ``{quoted}`` if it must be a string."""
    group: str = ""
    """A cell that forms a gloo process group on the ranks; empty if the tool forms the group."""
    stop: str = "pass"
    """Ends the ranks; empty if this would also end processes of other programs."""
    again: str = ""
    """Restores a working group after a rank has died; empty: use ``stop`` and ``begin``."""
    keeps: bool = True
    """True if ranks and their variables live from one cell to the next."""
    push: str = ""
    """Sends the kernel's ``array`` to all ranks."""
    pull: str = ""
    """Fetches ``array`` from all ranks into the kernel."""
    module: str = ""
    """The module that the kernel process runs instead of ipykernel; it starts the ranks."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_extension(self) -> bool:
        return "%load_ext" in self.load

    def on_ranks(self, source: str, num_ranks: int = 2) -> str:
        """Return the cell that a user writes to run ``source`` on all ranks."""
        return self.cell.format(source=source, quoted=repr(FORM_GROUP + source), n=num_ranks)


DDPNB = Peer(
    name="ddpnb",
    load="%load_ext ddpnb",
    begin="%ddp_start -n {n} --device cpu",
    cell="%%ddp\n{source}",
    stop="%ddp_stop",
    again="%ddp_restart --ranks 1",
    push="%ddp_push array",
    pull="back = __import__('ddpnb').pull('array')",
)
_PX_GROUP = """
import os, torch, torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
dist.init_process_group("gloo", rank=engine, world_size={n})
"""
_PX_STOP = "client.close(); cluster.stop_cluster_sync()"
_PX_BEGIN = """
cluster = ipp.Cluster(n={n}, log_level=40{options})
client = cluster.start_and_connect_sync()
client.activate()
view = client[:]
view.block = True
for index in range({n}):
    client[index].push(dict(engine=index), block=True)
"""
PX = Peer(
    name="ipyparallel",
    load="import ipyparallel as ipp",
    begin=_PX_BEGIN.replace("{options}", ""),
    cell="%%px\n{source}",
    group=_PX_GROUP,
    stop=_PX_STOP,
    push="view.push(dict(array=array))",
    pull="back = view.pull('array')",
)
PX_TUNED = Peer(
    name="ipyparallel, tuned",
    load=PX.load,
    begin=_PX_BEGIN.replace("{options}", ", controller_args=['--ping=200']"),
    cell="%%px --no-stream\n{source}",
    group=_PX_GROUP,
    stop=_PX_STOP,
    push="view.push(dict(array=array), track=False)",
    pull=PX.pull,
)
JUPYTER_DISTRIBUTED = Peer(
    name="jupyter-distributed",
    packages=("jupyter-distributed",),
    module="jupyter_distributed.kernel",
    environment={"JUPYTER_DISTRIBUTED_WORLD_SIZE": "{n}"},
    group=FORM_GROUP,
)
_NBDISTRIBUTED_BEGIN = """%dist_init -n {n}
import contextlib
connection = get_ipython().find_line_magic("dist_init").__self__._comm_manager
is_connected = False
while not is_connected:  # otherwise the first cell may be lost, and then takes 30 s
    with contextlib.suppress(TimeoutError):
        connection.send_to_all("get_status", {{}}, timeout=0.2)
        is_connected = True
"""
NBDISTRIBUTED = Peer(
    name="nbdistributed",
    packages=("nbdistributed",),
    load="%load_ext nbdistributed",
    begin=_NBDISTRIBUTED_BEGIN,
    cell="%%distributed\n{source}",
    stop="",  # %dist_reset and %dist_shutdown run `pkill -f "python.*worker"`
)
_MONARCH_BEGIN = """
import torch
from monarch.actor import Actor, endpoint, this_host
from monarch.spmd import setup_torch_elastic_env

class Runner(Actor):
    def __init__(self):
        self.names = {{"__name__": "__main__"}}

    @endpoint
    def run(self, source):
        self.names["torch"] = torch
        exec(source, self.names)

    @endpoint
    def put(self, value):
        self.names["array"] = value

    @endpoint
    def get(self):
        return self.names["array"]

mesh = this_host().spawn_procs({{"gpus": {n}}})
setup_torch_elastic_env(mesh)
runner = mesh.spawn("runner", Runner)
runner.run.call("pass").get()
"""
MONARCH = Peer(
    name="Monarch",
    packages=("torchmonarch",),
    begin=_MONARCH_BEGIN,
    cell="runner.run.call({source!r}).get()",
    group=FORM_GROUP,
    stop="mesh.stop().get()",
    push="runner.put.call(array).get()",
    pull="back = list(runner.get.call().get().values())",
)
ACCELERATE = Peer(
    name="accelerate notebook_launcher",
    packages=("accelerate",),
    begin="from accelerate import notebook_launcher",
    cell=(
        "def train():\n    exec({quoted}, dict(__name__='__main__'))\n"
        "notebook_launcher(train, num_processes={n})"
    ),
    keeps=False,
)
LIGHTNING = Peer(
    name="Lightning ddp_notebook",
    packages=("lightning",),
    begin="from lightning.fabric import Fabric",
    cell=(
        "fabric = Fabric(accelerator='cpu', devices={n}, strategy='ddp_notebook')\n"
        "def train(fabric):\n"
        "    exec({quoted}, dict(__name__='__main__'))\n"
        "fabric.launch(train)"
    ),
    keeps=False,
)
TORCHRUN = Peer(
    name="torchrun",
    load="import pathlib, sys",
    cell=(
        "pathlib.Path('script.py').write_text({quoted})\n"
        "!{{sys.executable}} -m torch.distributed.run --nproc-per-node={n} script.py"
    ),
    keeps=False,
)
_DASK_BEGIN = """
cluster = LocalCluster(n_workers={n}, threads_per_worker=1, dashboard_address=None)
client = Client(cluster)
workers = sorted(client.scheduler_info()["workers"])
def run(source, rank):
    import os
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="{n}", MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}"
    )
    exec(source, dict(__name__="__main__"))
"""
DASK = Peer(
    name="Dask LocalCluster",
    packages=("dask", "distributed"),
    load="from dask.distributed import Client, LocalCluster",
    begin=_DASK_BEGIN,
    cell=(
        "[each.result() for each in [client.submit(run, {quoted}, rank, workers=[worker], "
        "pure=False) for rank, worker in enumerate(workers)]]"
    ),
    stop="client.close(); cluster.close()",
    keeps=False,
)
PEERS = (
    DDPNB,
    PX,
    PX_TUNED,
    JUPYTER_DISTRIBUTED,
    NBDISTRIBUTED,
    MONARCH,
    ACCELERATE,
    LIGHTNING,
    DASK,
    TORCHRUN,
)


def is_installed(peer: Peer) -> bool:
    """Return True if a peer needs no package, or if ``environment`` has installed its packages."""
    return not peer.packages or (ENVIRONMENTS / peer.packages[0] / "installed").exists()


def environment(peer: Peer) -> str:
    """Make a peer's environment once, and return its Python; raise CannotError if pip fails."""
    if not peer.packages:
        return sys.executable
    folder = ENVIRONMENTS.absolute() / peer.packages[0]
    python = folder / "bin" / "python"
    if not is_installed(peer):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        [own] = (folder / "lib").glob("python*/site-packages")
        (own / "benchmark.pth").write_text("\n".join(site.getsitepackages()))
        install = [python, "-m", "pip", "install", "--quiet", *peer.packages]
        done = subprocess.run(install, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise CannotError("does not install: " + done.stderr.strip().splitlines()[-1])
        (folder / "installed").touch()
    return str(python)


class CannotError(Exception):
    """A peer cannot do the work, for the given reason."""


class NotebookOf:
    """A kernel with a peer, and a time limit for every cell; ranks write answers to ``folder``."""

    def __init__(self, peer: Peer, num_ranks: int = 2) -> None:
        self.peer, self.num_ranks = peer, num_ranks
        self.folder = Path(tempfile.mkdtemp(prefix="ddpnb-bench-"))
        self.mark = uuid.uuid4().hex
        self.printed, self.remark = "", ""
        self.first_picture: float | None = None
        python, self._began = environment(peer), time.perf_counter()
        own = {key: value.format(n=num_ranks) for key, value in peer.environment.items()}
        path = {"PATH": f"{Path(python).parent}:{os.environ['PATH']}"}  # as if activated
        self._manager = KernelManager(kernel_name="python3")
        argv = [python, "-m", peer.module or "ipykernel_launcher"]
        assert self._manager.kernel_spec is not None
        self._manager.kernel_spec.argv = [*argv, "-f", "{connection_file}"]
        if peer.module:
            self._manager.kernel_spec.interrupt_mode = "message"
        self._manager.start_kernel(
            cwd=str(self.folder), env={**os.environ, **path, **own, MARK: self.mark}
        )
        self._client = self._manager.client()
        self._client.start_channels()

    def open(self, *, begin: bool = True) -> None:
        """Wait for the kernel, load the peer, and start its ranks if ``begin``."""
        self._client.wait_for_ready(timeout=60)
        self.loaded_seconds = self.run(self.peer.load)
        self._opened_seconds = time.perf_counter() - self._began
        if begin:
            self.begin()

    def run(self, source: str, limit: float = LIMIT_SECONDS) -> float:
        """Run a cell and return its seconds; raise CannotError if it fails or exceeds the limit."""
        began = time.perf_counter()
        self.first_picture, parts = None, []

        def note(message: dict) -> None:
            content = message["content"]
            if message["header"]["msg_type"] == "stream":
                parts.append(content["text"])
            data = content.get("data", {})
            parts.append(str(data.get("text/plain", "")) if isinstance(data, dict) else "")
            if self.first_picture is None and "image/png" in str(data):
                self.first_picture = time.perf_counter() - began

        try:
            reply = self._client.execute_interactive(
                source,
                timeout=limit,
                output_hook=note,
                allow_stdin=False,
                stop_on_error=False,  # otherwise the kernel aborts a cell that is sent early
            )
        except TimeoutError:
            raise CannotError(f"not within {limit:g} s") from None
        finally:
            self.printed = "".join(parts)
        if reply["content"]["status"] != "ok":
            raise CannotError(f"{reply['content']['ename']}: {reply['content']['evalue']}"[:200])
        return time.perf_counter() - began

    def begin(self) -> float:
        """Start ranks and their group; return the seconds (with the kernel, if it starts them)."""
        text = self.peer.begin.format(n=self.num_ranks, port=free_port())
        seconds = self.run(text or "pass", 120) + (self._opened_seconds if self.peer.module else 0)
        if self.peer.group:
            seconds += self.cell(self.peer.group.format(n=self.num_ranks, port=free_port()))
        return seconds

    def send(self, source: str) -> None:
        """Begin a cell on all ranks without waiting for it."""
        self._client.execute(self.peer.on_ranks(source, self.num_ranks))

    def cell(self, source: str, limit: float = LIMIT_SECONDS) -> float:
        """Run ``source`` on all ranks and return the seconds."""
        return self.run(self.peer.on_ranks(source, self.num_ranks), limit)

    def said(self, name: str = "said") -> list[str]:
        """Return the texts of the ranks' files with this name, and remove the files."""
        found = []
        for path in sorted(self.folder.glob(f"{name}-*")):
            found.append(path.read_text())
            path.unlink()
        return found

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def processes(self) -> list[psutil.Process]:
        """Return all living processes that this notebook started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_alive = process.status() != psutil.STATUS_ZOMBIE
                if is_alive and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    @property
    def kernel_pid(self) -> int:
        return int(self._manager.provisioner.pid)

    def close(self) -> None:
        """End the kernel and all processes that remain; a second call has no effect."""
        self._client.stop_channels()
        if self._manager.has_kernel:
            self._manager.shutdown_kernel(now=True)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

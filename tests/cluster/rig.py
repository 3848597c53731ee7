"""Functions and values that the tests of a real cluster share."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from ddpnb.cluster.call import CallEvent, Output, Timeouts
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.group import ensure_group
from ddpnb.cluster.supervision import Watch
from ddpnb.hosts.processes import start_cluster
from ddpnb.hosts.spec import HostsSpec
from ddpnb.protocol.calls import calls
from ddpnb.protocol.cell_messages import CellSpec, Failure
from ddpnb.protocol.processes import RankCommand, portable
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.live import live
from ddpnb.results.store import Store
from ddpnb.session.comparison import prepare
from ddpnb.session.comparison_spec import ComparisonSpec
from ddpnb.session.status import describe_positions
from ddpnb.session.training import RunningComparison
from ddpnb.session.variables import pull as pull_variable
from tests.programs import find_program

ALL_REDUCE = """
import torch, torch.distributed as dist
total = torch.ones(1)
dist.all_reduce(total)
"""

_EIGHTHS = {name: seconds / 8 for name, seconds in asdict(Timeouts()).items()}
EIGHTH = replace(Timeouts(**_EIGHTHS), kill_after_seconds=Timeouts().kill_after_seconds)
"""An eighth of the usual timeouts, except for the time before a rank is killed."""

ENDLESS_SECONDS = 100.0
"""Longer than any cell of a test takes, even on a busy machine."""

DYNAMO = {"DDPNB_PRELOAD": "torch._dynamo"}
"""The fork server imports torch._dynamo, which each rank would import for over a second."""


FORKS = pytest.mark.skipif(portable(), reason="the cell forks a rank, which has imported torch")


def allow_mpi(patch: pytest.MonkeyPatch) -> None:
    """Allow Open MPI to run as root. Skip the test if Open MPI is not installed."""
    find_program(["mpiexec"], "needs openmpi-bin")
    patch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    patch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")


def shown(process: psutil.Process) -> bytes:
    """Return a process's command line and environment, or nothing if the process has ended."""
    folder = Path(f"/proc/{process.pid}")
    try:
        return (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def waits_for(sign: Path) -> str:
    """Return source code that waits until a file exists, for at most a minute."""
    return (
        "import time\nfrom pathlib import Path\nended_at = time.monotonic() + 60\n"
        f"while not Path({str(sign)!r}).exists() and time.monotonic() < ended_at: time.sleep(.01)\n"
    )


@contextlib.contextmanager
def started(
    num_ranks: int | None = None,
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> Iterator[Cluster]:
    """Start a cluster that the test may break, on this host or on the hosts in ``options``."""
    spec = HostsSpec(num_ranks=num_ranks, device="cpu", **options)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        cluster = start_cluster(spec)
    try:
        yield cluster
    finally:
        cluster.stop()


@dataclass(slots=True, kw_only=True)
class Ended:
    """A cell that runs or has ended, with its output."""

    watch: Watch
    printed: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Sentences that the user sees before the cell ends."""
    seconds: float = 0.0

    @property
    def failures(self) -> dict[int, Failure]:
        return {failure.rank: failure for failure in self.watch.failures}

    @property
    def lost(self) -> dict[int, str]:
        return self.watch.lost

    @property
    def hang(self) -> str:
        """The sentence about the hang, empty if the cell did not hang."""
        return self.watch.hang


def begin(
    cluster: Cluster,
    source: str,
    *,
    ranks: Sequence[int] | None = None,
    timeout: float | None = None,
    is_checked: bool = False,
    on_event: Callable[[CallEvent], None] = lambda _: None,
) -> Ended:
    """Send a cell to ranks. Call ``finish`` to supervise the cell until it ends."""
    ensure_group(cluster, is_checked=is_checked)
    printed: dict[int, str] = {}

    def handle(event: CallEvent) -> None:
        if isinstance(event, Output) and event.kind == "stream":
            text = printed.get(event.rank, "") + event.content["text"]
            printed[event.rank] = text
        on_event(event)

    chosen = cluster.ranks if ranks is None else ranks
    call = cluster.submit(calls.run_cell(CellSpec(source=source, execution_count=1)), chosen)
    notes: list[str] = []
    watch = Watch(
        cluster=cluster,
        call=call,
        handle=handle,
        timeout=timeout,
        notify=notes.append,
    )
    return Ended(watch=watch, printed=printed, notes=notes)


def finish(cell: Ended) -> Ended:
    """Supervise a cell until it ends. If the cell does not end, stop it and fail the test."""
    began = time.monotonic()
    seen: list[str] = []
    timer = threading.Timer(ENDLESS_SECONDS, stop_endless, (cell.watch, seen))
    timer.daemon = True
    timer.start()
    try:
        cell.watch.run()
    finally:
        timer.cancel()
    cell.seconds = time.monotonic() - began
    assert not seen, "\n".join(["the cell did not end", *seen])
    return cell


def stop_when(is_so: Callable[[], bool], cell: Ended) -> Ended:
    """Supervise a cell, and ask it to stop as soon as a condition holds."""

    def stop() -> None:
        wait_until(is_so, "ranks in the cell", timeout=60)
        cell.watch.stop_requested = True

    threading.Thread(target=stop).start()
    return finish(cell)


def stop_endless(watch: Watch, seen: list[str]) -> None:
    """Record the status of the ranks twice, one second apart, then stop the ranks."""
    for _ in range(2):
        asked = {
            rank: watch.cluster.processes.command(rank, RankCommand.STATUS)
            for rank in watch.cluster.living
        }
        time.sleep(1.0)
        seen.extend(f"rank {rank}: {each.done() and each.result()}" for rank, each in asked.items())
    seen.append(describe_positions(watch.cluster))
    seen.append(repr(watch))
    watch.stop_requested = True


def run(cluster: Cluster, source: str, **options: Any) -> Ended:
    return finish(begin(cluster, source, **options))


def pull(cluster: Cluster, expression: str, ranks: Sequence[int] | None = None) -> list[Any]:
    return pull_variable(cluster, expression, cluster.ranks if ranks is None else ranks)


def total(cluster: Cluster) -> list[float]:
    """Sum a one of each rank by all-reduce, and return each rank's result."""
    run(cluster, ALL_REDUCE)
    return pull(cluster, "total.item()")


def prepared(
    cluster: Cluster, folder: Path, *strategies: str, num_repeats: int = 1, **options: Any
) -> RunningComparison:
    """Prepare a comparison of only these strategies. ``folder`` stores its runs."""
    spec = ComparisonSpec(
        strategies=strategies,
        training=TrainingSpec(**options),
        num_repeats=num_repeats,
        baseline=False,
    )
    return prepare(cluster, Store(folder), spec, live())


def processes_of(cluster: Cluster) -> list[psutil.Process]:
    """Return the fork server, its children and all their descendants."""
    server = psutil.Process(cluster.processes.server.pid)
    return [server, *server.children(recursive=True)]


def controller_of(cluster: Cluster) -> psutil.Process:
    ranks = {state.pid for state in cluster.states}
    children = psutil.Process(cluster.processes.server.pid).children()
    (found,) = (each for each in children if each.pid not in ranks and is_alive(each))
    return found


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 30.0) -> float:
    """Wait for a condition, and return how many seconds the wait took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout, f"waited {timeout:g} s for: {what}"
        time.sleep(0.01)
    return time.monotonic() - began


def wait_until_gone(processes: Sequence[psutil.Process], timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while left := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < deadline, f"alive after {timeout:g} s: {left}"
        time.sleep(0.01)


def admits(place: tuple[str, int]) -> bool:
    """Return True if an address accepts connections within two seconds."""
    try:
        with socket.create_connection(place, timeout=2):
            return True
    except TimeoutError:
        return False


def knock(places: list[tuple[str, int]], times: int = 10_000) -> None:
    """Connect to addresses as a stranger: send nothing, garbage, or another protocol."""
    places = [place for place in places if admits(place)]
    assert places
    contents = (b"", b"\0" * 64, b"GET / HTTP/1.0\r\n\r\n")
    for number in range(times):
        place = places[number % len(places)]
        with socket.create_connection(place, timeout=30) as stranger, contextlib.suppress(OSError):
            stranger.sendall(contents[number // len(places) % 3])

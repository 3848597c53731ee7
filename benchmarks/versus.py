"""Compares ddpnb with other tools that run cells on several ranks: ``make bench``.

All peers (the tools) do the same work on this machine in turns.  If a peer cannot do it, the
table gives the reason.  ``python -m benchmarks versus:rows=start+cell,peers=ddpnb+torchrun``
measures some rows with some peers.  ``versus:quick=1`` measures fewer rounds and only fast rows.
Figures are stored, and shown in the tables, only if all peers took part.
"""

import contextlib
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import Figure, keeps, pss
from benchmarks.peers import DDPNB, LIMIT_SECONDS, PEERS, CannotError, NotebookOf, Peer
from benchmarks.table import README, RESULTS, between, machine, measured_on
from benchmarks.work import BY_HAND, COMPARE, LOOP, rate_in

RESULT = RESULTS / "versus.json"
OVERVIEW = README.parents[1] / "README.md"
HEADLINES = ("start", "raise", "left")
"""The rows that the main README shows."""
BEGIN, END = "<!-- what follows is written by: make bench -->\n", "<!-- until here -->\n"
CHECK_SECONDS = 2
"""An all-reduce that takes longer shows that a group does not work."""
QUIET_SECONDS = 30
"""The longest wait for an idle machine before each measurement."""
BUSY_PERCENT = 25
"""The machine is idle if programs use less of all cores."""
TRAINING_SECONDS = 300
"""Time limit for a training, whose speed is measured."""
LOADED_SECONDS = 2
"""Time between ``%load_ext`` and ``%ddp_start`` in the row ``ready``."""
LEFT_SECONDS = 10
"""Time between the kernel's death and the count of its processes."""
HANG_SECONDS = 1
"""Time between the beginning of a cell on all ranks and an interrupt or the kernel's death."""

OTHERS = "the tool's commands for a new group also kill processes of other programs"
ALL_REDUCE = "import torch, torch.distributed as dist\ndist.all_reduce(torch.ones(1))\n"
LINES = "import os\nfor i in range(20000): print(os.getpid(), i, 'x' * 73)"
"""Each rank prints different lines, because ddpnb shows equal lines of several ranks once."""
ONE_THREAD = "import torch\nnum_before = torch.get_num_threads()\ntorch.set_num_threads(1)\n"
SAY = "open(f'{folder}/said-{{dist.get_rank()}}', 'w').write(str({what}))\n"
BEGUN = "open(f'{folder}/begun-{{dist.get_rank()}}', 'w').close()\n"
ARRAY = "import numpy\narray = numpy.random.rand(12_500_000)"
RAISE = "if dist.get_rank() == 1: raise ValueError('on purpose')\ndist.all_reduce(torch.ones(1))"
BARRIER = "if dist.get_rank() == 1: dist.barrier()"
INTERRUPTED = "import time\nif dist.get_rank() == 1: dist.barrier()\nelse: time.sleep(600)"
KILLED = (
    "import os\nif dist.get_rank() == 1: os.kill(os.getpid(), 9)\ndist.all_reduce(torch.ones(1))"
)


@dataclass
class Measured:
    """The result of one peer in one row."""

    values: list[float] = field(default_factory=list)
    said: str = ""
    """The reason why the peer cannot do the work, or a remark on the values."""

    def __str__(self) -> str:
        value = f"{float(f'{statistics.median(self.values):.3g}'):,g}" if self.values else ""
        return ", ".join(filter(None, (value, self.said))) or "-"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table."""

    name: str
    unit: str = "s"
    work: Callable[[NotebookOf], float]
    """Measures one value in a notebook. It may set ``notebook.remark``."""
    rounds: int = 3
    num_ranks: int = 2
    is_open: bool = False
    """True if each peer's notebook stays open for all rounds, and for the next row if that row is
    open too. The first round is then not counted."""
    begins: bool = True
    """True if the ranks are started before the work."""
    limit: float = LIMIT_SECONDS
    """The longest time of the work, if ``unit`` is seconds."""
    goal: str = ""
    """``<= 0.4 of torchrun`` limits the ratio of both medians, ``<= 1.0`` only ddpnb's median."""

    def measure(
        self, peers: dict[str, Peer], rounds: int, opened: dict[str, NotebookOf]
    ) -> dict[str, Measured]:
        """Let the peers do the work in turns; ``opened`` holds the notebooks that stay open."""
        found = {name: Measured() for name in peers}
        for turn in range(rounds + self.is_open):
            for name, peer in peers.items():
                if found[name].said.startswith("cannot"):
                    continue
                with _noted(found[name]):
                    if name not in opened:
                        wait_for_quiet()
                        opened[name] = NotebookOf(peer, self.num_ranks)
                        opened[name].open(begin=self.begins)
                    opened[name].remark = ""
                    if self.begins:  # otherwise the load may have begun to start ranks
                        wait_for_quiet()
                    took = self.work(opened[name])
                    if self.unit == "s" and took > self.limit:
                        raise CannotError(f"not within {self.limit:g} s")
                    found[name].said = opened[name].remark
                    if turn or not self.is_open:
                        found[name].values.append(took)
                if name in opened and (not self.is_open or found[name].said.startswith("cannot")):
                    opened.pop(name).close()
        return found

    @property
    def rival(self) -> str:
        """The peer that the goal compares ddpnb with, or an empty string."""
        return self.goal.partition(" of ")[2]

    def promise(self, measured: dict[str, Measured]) -> str:
        """Return the promise and the measured value."""
        if not self.goal:
            return "-"
        theirs = measured.get(self.rival) if self.rival else Measured([1.0])
        ours = measured["ddpnb"]
        if not ours.values or theirs is None or not theirs.values:
            return self.goal
        value = statistics.median(ours.values) / statistics.median(theirs.values)
        return f"{self.goal}: {value:.2f}" + ("" if keeps(self.goal, value) else ", **missed**")


@contextlib.contextmanager
def _noted(measured: Measured) -> Iterator[None]:
    try:
        yield
    except CannotError as error:
        measured.values.clear()
        measured.said = f"cannot: {error}"


def _start(opened: NotebookOf) -> float:
    return opened.begin() + opened.cell(ALL_REDUCE)


def _start_loaded(opened: NotebookOf) -> float:
    time.sleep(LOADED_SECONDS)
    return _start(opened)


def _load(opened: NotebookOf) -> float:
    if not opened.peer.is_extension:
        raise CannotError("the tool is not a notebook extension")
    return opened.loaded_seconds


def _empty_cell(opened: NotebookOf) -> float:
    num_cells = 10 if opened.peer.keeps else 3
    return 1000 * statistics.median(opened.cell("pass") for _ in range(num_cells))


def _lines(opened: NotebookOf) -> float:
    took = opened.cell(LINES)
    num_arrived = opened.printed.count("x" * 73)
    opened.remark = "" if num_arrived >= 40_000 else f"{num_arrived} of 40,000 lines arrive"
    return took


def _push(opened: NotebookOf) -> float:
    opened.run(ARRAY)
    return opened.run(opened.peer.push or _no("the tool does not send variables"))


def _pull(opened: NotebookOf) -> float:
    source = opened.peer.pull or _no("the tool does not send variables")
    opened.cell(ARRAY)
    return opened.run(source)


def _no(reason: str) -> str:
    raise CannotError(reason)


def _rate(opened: NotebookOf) -> float:
    """Train with one thread on each rank, and then restore the number of threads."""
    restore = "torch.set_num_threads(num_before)"
    opened.cell(f"{ONE_THREAD}{LOOP}{_say_rate(opened)}{restore}", TRAINING_SECONDS)
    return _said_rate(opened)[0]


def _default_rate(opened: NotebookOf) -> float:
    opened.cell(LOOP + _say_rate(opened), TRAINING_SECONDS)
    rate, num_threads = _said_rate(opened)
    opened.remark = f"{num_threads:g} thread{'' if num_threads == 1 else 's'}"
    return rate


def _say_rate(opened: NotebookOf) -> str:
    return SAY.format(folder=opened.folder, what="[rate, torch.get_num_threads()]")


def _said_rate(opened: NotebookOf) -> list[float]:
    said = opened.said()
    found: list[float] = json.loads(said[0] if said else _no("the cell ends without a result"))
    return found


def _idle_memory(opened: NotebookOf) -> float:
    """Return the MB (PSS) of all processes except the kernel, divided by the number of ranks."""
    if not opened.peer.keeps:
        raise CannotError("the tool does not keep ranks and variables after a cell")
    opened.cell(ALL_REDUCE)
    others = [each.pid for each in opened.processes() if each.pid != opened.kernel_pid]
    return sum(map(pss, others)) / opened.num_ranks


def _fault(source: str, interrupt: bool = False) -> Callable[[NotebookOf], float]:
    """Return a function that causes a fault and measures the seconds until a group works again."""

    def work(opened: NotebookOf) -> float:
        if opened.peer.keeps:
            opened.cell(ALL_REDUCE + "kept = 7")
        begun = BEGUN.format(folder=opened.folder)
        began = [time.perf_counter()]

        def interrupt_all() -> None:
            _wait_for_ranks(opened)
            began[0] = time.perf_counter()
            opened.interrupt()

        if interrupt:
            threading.Thread(target=interrupt_all, daemon=True).start()
        with _in_time():
            opened.cell(ALL_REDUCE + begun + source)
        _works_again(opened)
        return time.perf_counter() - began[0]

    return work


def _wait_for_ranks(opened: NotebookOf) -> None:
    """Wait until all ranks run the code after ``BEGUN``."""
    end = time.monotonic() + LIMIT_SECONDS
    while len(list(opened.folder.glob("begun-*"))) < opened.num_ranks and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(HANG_SECONDS)


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    """Let a cell fail, but stop if it exceeds its time limit."""
    try:
        yield
    except CannotError as error:
        if str(error).startswith("not within"):
            raise


def _works_again(opened: NotebookOf) -> None:
    """Check that a group works; if it does not, use the peer's command for a new group."""
    check = ALL_REDUCE + SAY.format(folder=opened.folder, what="globals().get('kept')")
    try:
        opened.cell(check, CHECK_SECONDS if opened.peer.keeps else LIMIT_SECONDS)
    except CannotError as error:
        if str(error).startswith("not within"):
            opened.interrupt()
        command = opened.peer.again or opened.peer.stop or _no(OTHERS)
        with _in_time():
            opened.run(command)
        if not opened.peer.again:
            opened.begin()
        opened.cell(check)
    num_kept = opened.said().count("7")
    opened.remark = f"variables kept on {num_kept} of {opened.num_ranks} ranks"


def _left_behind(opened: NotebookOf) -> float:
    opened.send(f"{ALL_REDUCE}{BEGUN.format(folder=opened.folder)}import time\ntime.sleep(600)")
    _wait_for_ranks(opened)
    psutil.Process(opened.kernel_pid).kill()
    time.sleep(LEFT_SECONDS)
    return len(opened.processes())


def _comparison_rate(opened: NotebookOf) -> float:
    """Return the samples/s of ``ddp`` in a comparison, or of the same loop under torchrun."""
    if opened.peer is DDPNB:
        opened.run(COMPARE.format(strategies="'ddp'"), TRAINING_SECONDS)
        return rate_in(opened.printed)
    opened.cell(BY_HAND["ddp"], TRAINING_SECONDS)
    return rate_in(opened.printed)


def _whole(opened: NotebookOf) -> float:
    """Return the seconds of training several strategies, with the start of the ranks."""
    if opened.peer is DDPNB:
        return opened.begin() + opened.run(
            COMPARE.format(strategies=",".join(map(repr, BY_HAND))), 300
        )
    return sum(
        opened.run(opened.peer.on_ranks(script, 1 if name == "single" else opened.num_ranks), 300)
        for name, script in BY_HAND.items()
    )


def _first_picture(opened: NotebookOf) -> float:
    opened.run("result = %ddp_compare dp ddp async --task digits --epochs 4", 120)
    return opened.first_picture or float("nan")


def _wall_over_training(opened: NotebookOf) -> float:
    wall = opened.run("result = %ddp_compare dp ddp async --task digits --epochs 20", 120)
    opened.run("print('\\nrate', result.runs().seconds.sum())")
    return wall / rate_in(opened.printed)


ROWS = {
    "start": Row(
        name="time to start 2 ranks and finish a first all-reduce, directly after loading",
        work=_start,
        begins=False,
        goal="<= 0.4 of torchrun",
    ),
    "start8": Row(
        name="time to start 8 ranks and finish a first all-reduce, directly after loading",
        work=_start,
        begins=False,
        num_ranks=8,
        rounds=2,
        goal="<= 0.2 of torchrun",
    ),
    "load": Row(
        name="time to load the extension in a new kernel", work=_load, begins=False, goal="<= 0.3"
    ),
    "cell": Row(
        name="time of an empty cell",
        unit="ms",
        work=_empty_cell,
        rounds=6,
        is_open=True,
        goal="<= 0.75 of ipyparallel",
    ),
    "lines": Row(
        name="time to print 20,000 lines on each of 2 ranks",
        work=_lines,
        rounds=6,
        is_open=True,
        goal="<= 1.0 of ipyparallel",
    ),
    "push": Row(
        name="time to push 100 MB to 2 ranks",
        work=_push,
        rounds=6,
        is_open=True,
        goal="<= 0.1 of ipyparallel",
    ),
    "pull": Row(
        name="time to pull 100 MB from each of 2 ranks",
        work=_pull,
        rounds=6,
        is_open=True,
        goal="<= 0.2 of ipyparallel",
    ),
    "default_rate": Row(
        name="speed of training with DDP in a cell, 2 ranks with the tool's default number of "
        "threads",
        unit="samples/s",
        work=_default_rate,
        rounds=4,
        is_open=True,
    ),
    "rate": Row(
        name="speed of training with DDP in a cell, 2 ranks with one thread each",
        unit="samples/s",
        work=_rate,
        rounds=8,
        is_open=True,
        goal=">= 0.99 of torchrun",
    ),
    "memory": Row(name="memory (PSS) of an idle rank", unit="MB", work=_idle_memory, rounds=1),
    "raise": Row(
        name="time until a group works again, after a rank raises an exception while another waits",
        work=_fault(RAISE),
        rounds=2,
        goal="<= 1.0",
    ),
    "barrier": Row(
        name="time until a group works again, after a rank skips a barrier",
        work=_fault(BARRIER),
        rounds=1,
    ),
    "interrupt": Row(
        name="time until a group works again, after an interrupt in a collective",
        work=_fault(INTERRUPTED, interrupt=True),
        rounds=1,
    ),
    "killed": Row(
        name="time until a group works again, after a rank is killed in a collective",
        work=_fault(KILLED),
        rounds=1,
    ),
    "left": Row(
        name=f"number of processes {LEFT_SECONDS} s after the kernel is killed in a cell",
        unit="",
        work=_left_behind,
        rounds=1,
        goal="<= 0",
    ),
}
OURS = {
    "ready": Row(
        name=f"time of %ddp_start and a first all-reduce, {LOADED_SECONDS} s after %load_ext, "
        "2 ranks",
        work=_start_loaded,
        begins=False,
        goal="<= 0.15 of torchrun",
    ),
    "ready8": Row(
        name=f"time of %ddp_start and a first all-reduce, {LOADED_SECONDS} s after %load_ext, "
        "8 ranks",
        work=_start_loaded,
        begins=False,
        num_ranks=8,
        goal="<= 0.2 of torchrun",
    ),
    "comparison": Row(
        name="speed of ddp in a comparison, or of the same loop in a script, 2 ranks",
        unit="samples/s",
        work=_comparison_rate,
        rounds=4,
        is_open=True,
        goal=">= 0.98 of torchrun",
    ),
    "whole": Row(
        name=f"time to train {', '.join(BY_HAND)} in a comparison with its start, or in one script "
        "after the other",
        work=_whole,
        begins=False,
        rounds=1,
        limit=300,
        goal="<= 1.0 of torchrun",
    ),
    "picture": Row(
        name="time from Shift+Enter to the first picture of a comparison",
        work=_first_picture,
        goal="<= 30",
    ),
    "wall": Row(
        name="time of a comparison, divided by the time of its training",
        unit="",
        work=_wall_over_training,
        goal="<= 1.5",
    ),
}
"""Rows that only ddpnb runs, and torchrun if a promise compares ddpnb with torchrun."""
QUICK = ("start", "load", "cell", "push", "pull", "raise", "picture")


def measure(rows: str = "", peers: str = "", quick: int = 0, rounds: int = 0) -> list[Figure]:
    """Measure rows and peers (``+`` between names, default: all); ``rounds`` overrides the rows."""
    everyone = {peer.name: peer for peer in PEERS}
    asked = {name: everyone[name] for name in peers.split("+") if name} or everyone
    names = [name for name in rows.split("+") if name] or (QUICK if quick else [*ROWS, *OURS])
    opened: dict[str, NotebookOf] = {}
    try:
        for name in names:
            row = ROWS.get(name) or OURS[name]
            if not row.is_open:
                close_all(opened)
            beside = ("ddpnb", row.rival)
            given = asked if name in ROWS else {key: asked[key] for key in beside if key in asked}
            found = row.measure(given, rounds or max(1, row.rounds // (3 if quick else 1)), opened)
            print(f"{row.name}:", *(f"{peer} {each};" for peer, each in found.items()), flush=True)
            if not (quick or peers):
                keep(name, found)
    finally:
        close_all(opened)
    return []


def wait_for_quiet() -> None:
    """Wait until other programs use little of the cores, but not for long."""
    end = time.monotonic() + QUIET_SECONDS
    while psutil.cpu_percent(0.5) > BUSY_PERCENT and time.monotonic() < end:
        pass


def close_all(opened: dict[str, NotebookOf]) -> None:
    while opened:
        opened.popitem()[1].close()


def keep(name: str, row: dict[str, Measured]) -> None:
    """Replace the stored figures of a row, and write the tables of both READMEs."""
    rows = json.loads(RESULT.read_text())
    peers = {peer: asdict(each) for peer, each in row.items()}
    rows[name] = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "peers": peers}
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")
    write()


def write() -> None:
    for readme in (README, OVERVIEW):
        readme.write_text(with_table(readme))


def with_table(readme: Path) -> str:
    """Return the page with a new table between its two marks."""
    names = HEADLINES if readme == OVERVIEW else [*ROWS, *OURS]
    return between(readme.read_text(), BEGIN, END, table(names, json.loads(RESULT.read_text())))


def table(names: Sequence[str], stored: dict[str, Any]) -> str:
    """Return stored rows in Markdown: medians, and below them why a peer cannot run a row."""
    rows = {
        name: {peer: Measured(**each) for peer, each in stored[name]["peers"].items()}
        for name in names
        if name in stored
    }
    peers = [peer.name for peer in PEERS if any(peer.name in row for row in rows.values())]
    lines = [f"| | {' | '.join(peers)} | promise | measured on |", "|---" * (len(peers) + 3) + "|"]
    reasons: dict[str, int] = {}
    for name, found in rows.items():
        row = ROWS.get(name) or OURS[name]
        cells = [_cell(found.get(peer), reasons) for peer in peers]
        title = row.name + (f" ({row.unit})" if row.unit else "")
        cells += [row.promise(found), measured_on(stored[name])]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    notes = [f"[{number}] {text[0].upper()}{text[1:]}." for text, number in reasons.items()]
    return "\n".join([*lines, *(["", " ".join(notes)] if notes else []), ""])


def _cell(measured: Measured | None, reasons: dict[str, int]) -> str:
    """Return a cell of the table; each reason why a peer cannot do the work gets a number."""
    if measured is None or measured.values:
        return str(measured or "")
    reason = " ".join(measured.said.removeprefix("cannot: ").split())
    if reason.startswith("not within"):
        return reason
    number = reasons.setdefault(reason[:100].replace("|", "/"), len(reasons) + 1)
    return f"cannot [{number}]"

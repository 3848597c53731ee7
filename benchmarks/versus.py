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

import psutil

from benchmarks.measure import Figure, pss
from benchmarks.peers import DDPNB, PEERS, CannotError, NotebookOf, Peer
from benchmarks.table import README, RESULTS, machine
from benchmarks.work import BY_HAND, COMPARE, LOOP, rate_in

RESULT = RESULTS / "versus.json"
OVERVIEW = README.parents[1] / "README.md"
HEADLINES = ("start", "cell", "rate", "raise", "left")
"""The rows that the main README shows."""
BEGIN, END = "<!-- what follows is written by: make bench -->\n", "<!-- until here -->\n"
LIMIT_SECONDS = 5
"""Time limit for each cell after a fault."""
SLOW_SECONDS = 7
"""A peer that takes longer does the work only once."""
LINES_SECONDS = 10
"""Time limit for printing the lines."""
LEFT_SECONDS = 10
"""Time between the kernel's death and the count of its processes."""
INTERRUPT_SECONDS = 2
"""Time that a cell runs before the interrupt."""

ALL_REDUCE = "import torch, torch.distributed as dist\ndist.all_reduce(torch.ones(1))\n"
LINES = "import os\nfor i in range(20000): print(os.getpid(), i, 'x' * 73)"
"""Each rank prints different lines, because ddpnb shows equal lines of several ranks once."""
SAY = "open(f'{folder}/said-{{dist.get_rank()}}', 'w').write(str({what}))\n"
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
    open too. The first round is then not counted, unless the peer is slow."""
    begins: bool = True
    """True if the ranks are started before the work."""
    goal: str = ""
    """``<= 0.4 of torchrun`` limits the ratio of both medians, ``<= 1.0`` only ddpnb's median."""

    def measure(
        self, peers: dict[str, Peer], rounds: int, opened: dict[str, NotebookOf]
    ) -> dict[str, Measured]:
        """Let the peers do the work in turns; ``opened`` holds the notebooks that stay open."""
        found = {name: Measured() for name in peers}
        slow: set[str] = set()
        for turn in range(rounds + self.is_open):
            for name, peer in peers.items():
                if found[name].said.startswith("cannot") or name in slow:
                    continue
                with _noted(found[name]):
                    if name not in opened:
                        opened[name] = NotebookOf(peer, self.num_ranks)
                        opened[name].open(begin=self.begins)
                    opened[name].remark = ""
                    began = time.perf_counter()
                    took = self.work(opened[name])
                    found[name].said = opened[name].remark
                    if time.perf_counter() - began > SLOW_SECONDS:
                        slow.add(name)
                    is_counted = not self.is_open or turn > 0 or name in slow
                    found[name].values += [took] if is_counted else []
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
        sign, bound = self.goal.split()[:2]
        theirs = measured.get(self.rival) if self.rival else Measured([1.0])
        ours = measured["ddpnb"]
        if not ours.values or theirs is None or not theirs.values:
            return self.goal
        value = statistics.median(ours.values) / statistics.median(theirs.values)
        is_kept = value <= float(bound) if sign == "<=" else value >= float(bound)
        return f"{self.goal}: {value:.2f}" + ("" if is_kept else ", **missed**")


@contextlib.contextmanager
def _noted(measured: Measured) -> Iterator[None]:
    try:
        yield
    except CannotError as error:
        measured.values.clear()
        measured.said = f"cannot: {error}"


def _start(opened: NotebookOf) -> float:
    return opened.begin() + opened.cell(ALL_REDUCE)


def _load(opened: NotebookOf) -> float:
    if not opened.peer.is_extension:
        raise CannotError("the tool is not a notebook extension")
    return opened.loaded_seconds


def _empty_cell(opened: NotebookOf) -> float:
    num_cells = 10 if opened.peer.keeps else 3
    return 1000 * statistics.median(opened.cell("pass") for _ in range(num_cells))


def _lines(opened: NotebookOf) -> float:
    took = opened.cell(LINES, LINES_SECONDS)
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
    opened.cell(LOOP + SAY.format(folder=opened.folder, what="rate"))
    said = opened.said()
    return float(said[0] if said else _no("the cell ends without a result"))


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
        if interrupt:
            threading.Timer(INTERRUPT_SECONDS, opened.interrupt).start()
        began = time.perf_counter()
        with _in_time():
            opened.cell(ALL_REDUCE + source, LIMIT_SECONDS)
        _works_again(opened)
        return time.perf_counter() - began - (INTERRUPT_SECONDS if interrupt else 0)

    return work


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    """Let a cell fail, but stop if it exceeds its time limit."""
    try:
        yield
    except CannotError as error:
        if str(error).startswith("not within"):
            raise


def _works_again(opened: NotebookOf) -> None:
    """Wait until a group works again; if it does not, use the peer's command for a new group."""
    check = ALL_REDUCE + SAY.format(folder=opened.folder, what="globals().get('kept')")
    try:
        opened.cell(check, LIMIT_SECONDS)
    except CannotError:
        with _in_time():
            opened.run(opened.peer.again or opened.peer.stop, LIMIT_SECONDS)
        if not opened.peer.again:
            opened.begin()
        opened.cell(check, LIMIT_SECONDS)
    num_kept = opened.said().count("7")
    opened.remark = f"variables kept on {num_kept} of {opened.num_ranks} ranks"


def _left_behind(opened: NotebookOf) -> float:
    opened.send(ALL_REDUCE + "import time\ntime.sleep(600)")
    time.sleep(2)
    psutil.Process(opened.kernel_pid).kill()
    time.sleep(LEFT_SECONDS)
    return len(opened.processes())


def _comparison_rate(opened: NotebookOf) -> float:
    """Return the samples/s of ``ddp`` in a comparison, or of the same loop under torchrun."""
    if opened.peer is DDPNB:
        opened.run(COMPARE.format(strategies="'ddp'"), 300)
        return rate_in(opened.printed)
    opened.cell(BY_HAND["ddp"], 300)
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
    opened.run("print('\\nrate', result.to_frame().seconds.sum())")
    return wall / rate_in(opened.printed)


ROWS = {
    "start": Row(
        name="time to start 2 ranks and finish a first all-reduce",
        work=_start,
        begins=False,
        goal="<= 0.4 of torchrun",
    ),
    "start8": Row(
        name="time to start 8 ranks and finish a first all-reduce",
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
    "rate": Row(
        name="speed of training with DDP in a cell, 2 ranks",
        unit="samples/s",
        work=_rate,
        rounds=3,
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
"""Rows that no peer can run, except that torchrun runs ``comparison`` and ``whole``."""
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


def close_all(opened: dict[str, NotebookOf]) -> None:
    while opened:
        opened.popitem()[1].close()


def keep(name: str, row: dict[str, Measured]) -> None:
    """Replace the stored figures of a row, and write the tables of both READMEs."""
    stored = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": {}}
    stored |= {"date": time.strftime("%Y-%m-%d"), "machine": machine()}
    stored["rows"][name] = {peer: asdict(each) for peer, each in row.items()}
    RESULT.write_text(json.dumps(stored, indent=1) + "\n")
    for readme in (README, OVERVIEW):
        readme.write_text(with_table(readme))


def with_table(readme: Path) -> str:
    """Return the page with a new table between its two marks."""
    before, _, rest = readme.read_text().partition(BEGIN)
    shown = table(HEADLINES if readme == OVERVIEW else [*ROWS, *OURS], readme == OVERVIEW)
    return f"{before}{BEGIN}{shown}{END}{rest.partition(END)[2]}"


def table(names: Sequence[str], is_short: bool = False) -> str:
    """Return stored rows in Markdown: medians, and below them why a peer cannot run a row."""
    if not RESULT.exists():
        return ""
    stored = json.loads(RESULT.read_text())
    rows = {
        name: {peer: Measured(**each) for peer, each in stored["rows"][name].items()}
        for name in names
        if name in stored["rows"]
    }
    peers = [peer.name for peer in PEERS if any(peer.name in row for row in rows.values())]
    last = "" if is_short else " promise |"
    lines = [f"| | {' | '.join(peers)} |{last}", "|---" * (len(peers) + 2 - is_short) + "|"]
    reasons: dict[str, int] = {}
    for name, found in rows.items():
        row = ROWS.get(name) or OURS[name]
        cells = [_cell(found.get(peer), reasons) for peer in peers]
        title = row.name + (f" ({row.unit})" if row.unit else "")
        last = "" if is_short else f" {row.promise(found)} |"
        lines.append(f"| {title} | {' | '.join(cells)} |{last}")
    about = stored["machine"]
    on = f"{stored['date']}, {about['cores']} cores of {about['cpu']}, torch {about['torch']}"
    notes = ". ".join(f"[{number}] {text[0].upper()}{text[1:]}" for text, number in reasons.items())
    return "\n".join([*lines, *([] if is_short else ["", f"Measured on {on}. {notes}."]), ""])


def _cell(measured: Measured | None, reasons: dict[str, int]) -> str:
    """Return a cell of the table; each reason why a peer cannot do the work gets a number."""
    if measured is None or measured.values:
        return str(measured or "")
    reason = " ".join(measured.said.removeprefix("cannot: ").split())
    if reason.startswith("not within"):
        return reason
    number = reasons.setdefault(reason[:100].replace("|", "/"), len(reasons) + 1)
    return f"cannot [{number}]"

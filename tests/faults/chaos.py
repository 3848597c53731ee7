"""Injects faults at random, and checks what a user sees and what remains: ``make chaos``.

A real kernel runs the cell of a phase. Faults hit processes, the kernel or the run folder. Then the
case follows the messages' advice. ``python -m tests.faults.chaos --seed 7 --only 17`` repeats one.
"""

import argparse
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import psutil

from tests.cells import CELL
from tests.faults import chaos_judges as judges
from tests.kernel.client import Cell, Kernel

MARKER = "DDPNB_CHAOS"  # an environment variable of all processes of a kernel
FAR = float("inf")
KNOWN_SECONDS = 0.5  # after this time, a message must name a second fault
PATIENCE_SECONDS, INTERRUPTED_SECONDS = 15.0, 25.0
"""If a process is stopped for ever, the user interrupts the kernel. Then the prompt returns within
5 s, and 20 s until ddpnb has killed ranks."""

IN_CELL = """%%ddp{}
import pathlib, time, torch
print(rank)
pathlib.Path("sign").touch()
for n in range({}): {}
print(rank)
"""
COMPUTE = "torch.rand(99, 99).inverse(); time.sleep(0.01)"
SUM = "torch.distributed.all_reduce(torch.ones(9)); time.sleep(0.001)"
SEND = "open('sign', 'w').close()\n" + "%ddp_push big\npulled = %ddp_pull big\n" * 6
TRAIN = f"""%%ddp_compare {{}} --no-baseline --epochs 10 --batch-size 20{CELL}
import pathlib, time
num_steps = 0
class Slow(nn.Sequential):
    def forward(self, x):
        global num_steps
        num_steps += self.training
        if num_steps > {{}} and self.training == {{}}: pathlib.Path("sign").touch()
        time.sleep(0.02)
        return super().forward(x)
def model(): return Slow(nn.Linear(4, 2))
"""
PHASES = {
    "idle": (0.0, 20, "pass"),
    "start": (2.5, 25, "%ddp_stop", "%ddp_start -n {n} --device cpu"),
    "restart": (2.5, 25, "%ddp_restart"),
    "restart of a rank": (1.0, 25, "%ddp_restart --ranks 0"),
    "computing": (1.5, 20, IN_CELL.format("", 200, COMPUTE)),
    "printing": (0.5, 20, IN_CELL.format("", 20_000, "print(rank, n)")),
    "in a collective": (1.0, 20, IN_CELL.format("", 999, SUM)),
    "push and pull": (1.0, 20, "import numpy\nbig = numpy.ones(2_000_000)", SEND),
    "check": (0.5, 30, TRAIN.format("ddp", 0, True)),
    "ddp": (1.5, 25, TRAIN.format("ddp", 30, True)),
    "async": (1.5, 30, TRAIN.format("async", 30, True)),
    "hogwild": (1.5, 30, TRAIN.format("hogwild", 30, True)),
    "evaluation": (0.1, 25, TRAIN.format("ddp", 30, False)),
    "no-wait": (1.5, 20, IN_CELL.format(" --no-wait", 200, COMPUTE), "_.wait(60)"),
    "stop": (0.4, 20, "open('sign', 'w').close()\n%ddp_stop"),
}
"""For each phase: the longest time from the file sign to the fault, the longest time from the fault
to the prompt, and the cells. The fault hits the last cell."""
RENEWING = ("start", "restart", "restart of a rank", "stop")
"""Phases in which ranks end without a fault."""
TARGETS = ["controller", "fork server", "child", "kernel", "notebook", "run folder", "rank 0"]
TARGETS += ["ranks"] * 4
KINDS = {"notebook": ["interrupt"], "run folder": ["delete"]}

SETUP = """%%ddp --name before
import subprocess, ddpnb
kept = True
child = subprocess.Popen(["sleep", "1000"], start_new_session=True) if rank == 0 else None
ddpnb.log(loss=1.0, samples=1)
"""
USABLE = """%%ddp
import torch
total = torch.ones(1)
torch.distributed.all_reduce(total)
assert total.item() == world_size
print("kept" in globals())
"""
TINY = f"%%ddp_compare ddp --no-baseline --epochs 1 --batch-size 20{CELL}"


class Fault(NamedTuple):
    names: list[str]
    kind: str
    after: float  # seconds after the sign, or after the previous fault
    resumes_after: float  # seconds after which a stopped process continues


@dataclass
class Case:
    seed: int
    number: int
    phase: str
    num_ranks: int
    faults: list[Fault]
    found: list[str] = field(default_factory=list)
    followed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    transcript: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        hit = " + ".join(f"{each.kind} {', '.join(each.names)}" for each in self.faults)
        what = f"{self.number:4} {self.phase:18} {hit:40} n={self.num_ranks} {self.seconds:5.1f} s"
        advice = ", ".join(self.followed) or "no advice"
        return f"{what}  {advice}  {'; '.join(dict.fromkeys(self.found)) or 'OK'}"


def draw(seed: int, number: int) -> Case:
    """Draw a case, which has one or two faults. It depends only on these arguments."""
    rng = random.Random(f"{seed}:{number}")
    phase, num_ranks = rng.choice([*PHASES]), rng.choice((1, 2, 2, 3, 3, 4, 5))
    case = Case(seed, number, phase, num_ranks, [])
    for after in (rng.uniform(0, PHASES[phase][0]), rng.uniform(0.1, 1)):
        target = rng.choice(TARGETS)
        some = sorted(rng.sample(range(num_ranks), rng.randint(1, num_ranks)))
        names = [f"rank {rank}" for rank in some] if target == "ranks" else [target]
        kind = rng.choice(KINDS.get(target, ["SIGKILL", "SIGINT", "SIGSTOP", *judges.DEADLY[:4]]))
        case.faults.append(Fault(names, kind, after, rng.choice((rng.uniform(1, 5), FAR))))
    del case.faults[1 + (rng.random() < 0.2) :]
    return case


class Run:
    """Runs cases in one kernel, until a case ends the kernel."""

    def __init__(self, cases: list[Case], folder: Path) -> None:
        self.marker, self.case = f"{cases[0].seed}-{cases[0].number}-{os.getpid()}", cases[0]
        (folder / "data").mkdir(parents=True)
        self.kernel = Kernel(folder, {MARKER: self.marker})
        self.process = self.kernel.manager.provisioner.process
        self.folders: set[Path] = set()
        self.cell("%load_ext ddpnb")
        for self.case in cases:
            self.struck, self.struck_at = {}, time.monotonic()
            try:
                self.follow(self.hit())
            except (TimeoutError, AssertionError, OSError) as error:
                hits_kernel = any("kernel" in fault.names for fault in self.case.faults)
                self.case.found = [] if hits_kernel else [*self.case.found, str(error)]
        self.end()

    def cell(self, source: str, limit: float = 60.0, cell: Cell | None = None) -> Cell:
        """Run a cell, and interrupt it after ``limit`` seconds. Raise TimeoutError if in vain."""
        began, cell = time.monotonic(), cell or self.kernel.begin(source)
        if not self.has_ended(cell, limit):
            if limit > PATIENCE_SECONDS and "Interrupt the cell" not in cell.text:
                self.case.found.append(f"no prompt within {limit:g} s: {source.splitlines()[0]}")
            self.kernel.interrupt()
            self.has_ended(cell, INTERRUPTED_SECONDS)
        text = re.sub(r"(?s)^(.{3000}).*(.{3000})$", r"\1\n...\n\2", cell.text)
        status = f"{cell.status or 'no prompt'}, {time.monotonic() - began:.1f} s"
        self.case.transcript.append(f">>> {source}\n--- {status}\n{text}")
        if not cell.status:
            raise TimeoutError(f"no prompt after an interrupt: {source.splitlines()[0]}")
        return cell

    def has_ended(self, cell: Cell, limit: float) -> bool:
        """Wait until a cell has ended, longer on a busy machine, or until the kernel has died."""
        idle = (cell.request, "status", {"execution_state": "idle"})
        load = os.getloadavg()[0] / (os.cpu_count() or 1) if limit > PATIENCE_SECONDS else 1.0
        deadline = time.monotonic() + limit * min(2.0, max(1.0, load))
        while not cell.status and time.monotonic() < deadline and self.process.poll() is None:
            with suppress(TimeoutError):
                if idle in self.kernel.messages(0.2):
                    cell.status = self.kernel._reply(cell.request, 10.0)["status"]
        return bool(cell.status) or self.process.poll() is not None

    def hit(self) -> Cell:
        """Run the phase's cells, inject the faults into the last one, and return it."""
        case = self.case
        _, limit, *before, source = PHASES[case.phase]
        self.cell(f"n = {case.num_ranks}\n%ddp_start -n {{n}} --device cpu")
        self.cell(SETUP)
        assert len(self.targets()) == case.num_ranks + 6, self.targets()
        for each in before:
            self.cell(each)
        injector = threading.Thread(target=self.inject, daemon=True)
        cell = self.kernel.begin(source)
        injector.start()
        stops = [each.resumes_after for each in case.faults if each.kind == "SIGSTOP"]
        limit = PATIENCE_SECONDS if FAR in stops else limit + sum(stops)
        self.cell(source, limit, cell)
        ended_at = time.monotonic()
        injector.join(40)
        case.seconds = max(0.0, ended_at - self.struck_at)
        case.transcript.append(f"(hit: {self.struck})")
        if len(case.faults) == 2 and ended_at < self.struck_at + KNOWN_SECONDS:
            self.struck = None  # the message could not know the second fault
        if source.startswith("%%ddp\n"):
            num_lines = 20_002 if case.phase == "printing" else 2
            case.found += judges.missing_output(cell, case.num_ranks, num_lines)
        return cell

    def inject(self) -> None:
        """Inject the faults, while the main thread reads the kernel's messages."""
        sign, has_sign = self.kernel.folder / "sign", "sign" in str(PHASES[self.case.phase])
        deadline = time.monotonic() + 30 * has_sign
        while not sign.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        sign.unlink(missing_ok=True)
        for fault in self.case.faults:
            time.sleep(fault.after)
            deadline = time.monotonic() + 15.0
            while {*fault.names} - {*(found := self.targets())} and time.monotonic() < deadline:
                time.sleep(0.01)
            for name in {*fault.names} & {*found}:
                self.struck[name] = fault.kind
                with suppress(ProcessLookupError):
                    self.send(fault, found[name])
            self.struck_at = time.monotonic()

    def send(self, fault: Fault, target: Any) -> None:
        if fault.kind == "delete":
            depth = str(self.case.number % 2)  # a clean-up service may leave the folder itself
            words = ["find", target, "-mindepth", depth, "-delete"]
            subprocess.run(words, stderr=subprocess.DEVNULL, check=False)
            return
        if fault.kind == "interrupt":
            self.kernel.interrupt()
            return
        os.kill(target, getattr(signal, fault.kind))
        if fault.kind == "SIGSTOP" and fault.resumes_after < FAR:
            threading.Timer(fault.resumes_after, os.kill, (target, signal.SIGCONT)).start()

    def targets(self) -> dict[str, Any]:
        """Return the ids of the kernel's processes by name, and the run folder."""
        found: dict[str, Any] = {"kernel": self.process.pid, "notebook": self.process.pid}
        for each in sorted(self.marked(), key=lambda one: one.info["ppid"] != self.process.pid):
            words, parent = each.info["cmdline"] or [], each.info["ppid"]
            if words == ["sleep", "1000"]:
                found["child"] = each.pid
            elif "ddpnb.forkserver.server" in words and parent == self.process.pid:
                found |= {"fork server": each.pid, "run folder": Path(words[4])}
                self.folders.add(Path(words[4]))
            elif parent == found.get("fork server"):
                with suppress(OSError):
                    files = " ".join(map(os.readlink, Path(f"/proc/{each.pid}/fd").iterdir()))
                    if log := re.search(r"/(\w+)\.log", files):
                        found[f"rank {log[1]}" if log[1].isdigit() else log[1]] = each.pid
        return found

    def marked(self) -> list[psutil.Process]:
        """Return the living processes of this kernel, also those in a session of their own."""
        every = psutil.process_iter(["ppid", "cmdline", "environ"])
        return [each for each in every if (each.info["environ"] or {}).get(MARKER) == self.marker]

    def follow(self, message: Cell) -> None:
        """Follow the advice of each message literally until all ranks work."""
        case, said = self.case, ""
        for _ in range(len(case.faults) + 2):
            case.found += judges.unclear(message)
            is_wait = case.phase == "no-wait" and message.error == "KeyboardInterrupt"
            is_judged = message.error and not is_wait and case.phase not in RENEWING[1:]
            struck, blamed, answer = dict(self.struck or {}), message.text, message
            said += message.text
            if advice := next(iter(judges.commands(message.text)), ""):
                case.found += ["the same advice again"] * (case.followed[-1:] == [advice])
                case.followed.append(advice)
                is_stopped = FAR in (f.resumes_after for f in case.faults if f.kind == "SIGSTOP")
                answer = self.cell(advice, PATIENCE_SECONDS if is_stopped else 60.0)
                if answer.error:
                    last = answer.error_text.splitlines()[-1][:99]
                    is_new = judges.gone_ranks(last, []).keys() - judges.gone_ranks(said, []).keys()
                    is_known = len(case.followed) >= len(case.faults) and not is_new
                    is_cut = answer.error == "KeyboardInterrupt"  # which waited for a stopped one
                    case.found += [f"{advice} fails: {last}"] * (is_known and not is_cut)
                else:  # it may name ranks that have ended since the message
                    said, blamed = said + answer.text, blamed + answer.text
            if is_judged and self.struck is not None:
                is_sure = len(case.faults) == 1 and message.error != "KeyboardInterrupt"
                case.found += judges.false_blame(blamed, struck, is_sure=is_sure)
                self.struck = None  # later messages need not repeat it
            if advice and answer.error:
                message = answer
                continue
            usable = self.cell(USABLE, 20.0)
            if not usable.error:
                break
            is_new = len(case.faults) == 2 and self.struck is None  # since the message
            if message.error not in ("", "KeyboardInterrupt") and not advice and not is_new:
                case.found.append("no command is named, and the next cell fails")
            message = usable
        else:
            return case.found.append("not usable after all advice")
        if case.phase not in RENEWING:
            kept = {rank: each == ["True"] for rank, each in usable.by_rank.items()}
            case.found += judges.lost_variables(kept, said, case.followed)
        if (tiny := self.cell(TINY)).error:
            case.found.append(f"the next comparison fails: {tiny.error_text.splitlines()[-1][:99]}")

    def end(self) -> None:
        """End the cluster and the kernel. Only the stored runs may remain."""
        found, store = self.case.found, self.kernel.folder / "data/runs/runs.sqlite3"
        self.targets()
        with suppress(TimeoutError):
            if self.process.poll() is None and "kernel" not in str(self.case.faults):
                found += judges.unclear(self.cell("%ddp_stop", 20.0))
        self.kernel.client.stop_channels()
        self.kernel.manager.shutdown_kernel(now=True)
        _, left = psutil.wait_procs(self.marked(), timeout=25)
        for each in left:
            found.append(f"left: {' '.join(each.info['cmdline'] or ())[-40:]}")
            each.kill()
        found += ["a run folder is left" for each in self.folders if each.exists()]
        with sqlite3.connect(store) as opened:
            state = opened.execute("PRAGMA integrity_check").fetchall()
            names = opened.execute("SELECT name FROM comparisons").fetchall()
        found += ["the store has lost runs"] * (state != [("ok",)] or ("before",) not in names)


def run_cases(cases: list[Case], folder: Path) -> list[Case]:
    """Run cases in one kernel, and write the transcripts of faulty cases to ``folder``."""
    own = folder / f"{cases[0].seed}-{cases[0].number}"
    own.mkdir(parents=True)
    with (own / "stderr").open("w+", errors="replace") as errors:
        os.dup2(errors.fileno(), 2)
        Run(cases, own / "project")
        errors.seek(0)
        said = errors.read()
    if not any("kernel" in fault.names for case in cases for fault in case.faults):
        cases[-1].found += judges.internals(said, "the kernel's stderr")
    rmtree(own)
    for case in (case for case in cases if case.found):
        lines = [str(case), repr(case.faults), *case.transcript, said[-6000:]]
        (folder / f"{case.seed}-{case.number}.txt").write_text("\n\n".join(lines))
    return cases


def run_groups(groups: list[list[Case]], folder: Path, num_jobs: int) -> Iterator[Case]:
    """Run groups of cases, several at once, each in a kernel of its own. Yield ended cases."""
    with ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn")) as pool:
        for ended in as_completed([pool.submit(run_cases, cases, folder) for cases in groups]):
            yield from ended.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("seed", 1), ("cases", 60), ("jobs", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", type=int, action="append", help="number of a case to repeat")
    chosen = parser.parse_args()
    folder, began, ended = Path(tempfile.mkdtemp(prefix="chaos-")), time.monotonic(), []
    groups = [[draw(chosen.seed, number)] for number in chosen.only or range(chosen.cases)]
    for case in run_groups(groups, folder, chosen.jobs):
        print(case, flush=True)
        ended.append(case)
    print()
    for phase in PHASES:
        own = [case for case in ended if case.phase == phase]
        num, slowest = (
            sum(bool(case.found) for case in own),
            max([0, *(case.seconds for case in own)]),
        )
        print(f"{phase:18} {len(own):3} cases, {num:3} faulty, slowest prompt {slowest:5.1f} s")
    for found, num in Counter(each for case in ended for each in {*case.found}).most_common():
        print(f"{num:4} x {found}")
    print(f"seed {chosen.seed}, {time.monotonic() - began:.0f} s, transcripts in {folder}")
    return int(any(case.found for case in ended))


if __name__ == "__main__":
    sys.exit(main())

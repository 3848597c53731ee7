"""Judges what a user sees after a fault. Each judge returns a sentence for each violation."""

import re

from ddpnb.protocol.notation import parse_ranks
from tests.kernel.client import Cell

COMMAND = re.compile(r"%ddp_(?:start|restart|interrupt|stop)(?: (?:--ranks|-n) \d[\d,-]*\b)?")
INTERNALS = re.compile(r'(?:ddpnb/[a-z]+|ipyparallel)/[\w/]+\.py(?!", line \d+ in )|Exception ign')
"""Frames of ddpnb, except in the report that Python's faulthandler writes at a crash."""
VERB = r"(?: was| were| has| have| is| are)?(?: also)? (?:ended|dead|died|killed)"
GONE = re.compile(rf"[Rr]anks? ([\d,-]*\d){VERB}(?: (?:by|at) (SIG\w+|\d))?")
SERVICES = ("fork server", "controller", "run folder")
DEADLY = ("SIGKILL", "SIGTERM", "SIGABRT", "SIGSEGV", "delete")
CLEAR = ("", "UserError", "RankError", "KeyboardInterrupt", "HangError", "CellTimeoutError")


def commands(text: str) -> list[str]:
    """Return the commands that a message names, the last one first."""
    return COMMAND.findall(text)[::-1]


def gone_ranks(text: str, advice: list[str]) -> dict[int, str]:
    """Return the ranks that a text calls dead or an advice replaces, with signals if it has any."""
    text = " ".join([*(f"rank {each.split()[-1]} ended" for each in advice), text])
    return {rank: sign for some, sign in GONE.findall(text) for rank in parse_ranks(some, 99)}


def unclear(cell: Cell) -> list[str]:
    """Find an error of an unexpected class, a UserError of several lines, and internals."""
    has_log = "while starting" in cell.error_text
    is_long = cell.error == "UserError" and "\n" in cell.error_text and not has_log
    found = [cell.error_text.splitlines()[-1]] if is_long or cell.error not in CLEAR else []
    return found + internals(cell.text, cell.error or "output")


def internals(text: str, where: str) -> list[str]:
    """Find frames of ddpnb's own code, and exceptions that nobody handled."""
    return [f"internals in {where}: {found}" for found in INTERNALS.findall(text)[-1:]]


def missing_output(cell: Cell, num_ranks: int, num_lines: int) -> list[str]:
    """Find ranks without all their lines in a cell that ended well and does not say so."""
    lines = [len(cell.by_rank.get(rank, ())) for rank in range(num_ranks)]
    is_said = cell.error or "incomplete" in cell.text or {*lines} == {num_lines}
    return [] if is_said else [f"ok with {lines} lines of the ranks, not {num_lines}"]


def false_blame(text: str, hit: dict[str, str], *, is_sure: bool) -> list[str]:
    """Compare the dead processes that a message names with those that faults have ended.

    ``hit`` maps names such as ``"rank 1"`` to signals. Only if ``is_sure``, the signal matters.
    """
    gone = gone_ranks(text, commands(text))
    died = {name: kind for name, kind in hit.items() if kind in DEADLY}
    if services := [name for name in SERVICES if name in died]:
        is_named = any(name.removeprefix("run ") in text for name in services)
        return [] if is_named else [f"{services[0]}: the message does not name it"]
    found = [
        f"the {each} is blamed" for each in SERVICES if f"{each} was" in text and each not in hit
    ]
    is_first = "while starting" in text and gone  # the first death ends a start
    for name in (name for name in died if name.startswith("rank ") and not is_first):
        seen = gone.get(int(name.split()[1]))
        if seen is None or (is_sure and not {died[name], *"0123456789"} & {*gone.values()}):
            found.append(f"a rank died of {died[name]}: the message says {seen or 'no signal'}")
    return found


def lost_variables(kept: dict[int, bool], text: str, followed: list[str]) -> list[str]:
    """Find ranks that lost their variables although no message named them as ended or replaced."""
    named = gone_ranks(text, followed)
    is_new = any("start" in each and "--ranks" not in each for each in followed)
    lost = [rank for rank in kept if not (kept[rank] or is_new or rank in named)]
    return ["ranks lost their variables, and no message says so"] if lost else []

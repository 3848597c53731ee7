"""A fault in most phases of the chaos test, and messages that its judges accept or reject."""

from pathlib import Path

from tests.faults import chaos_judges as judges
from tests.faults.chaos import KINDS, Case, Fault, run_groups
from tests.kernel.client import Cell

TARGETS = {
    "child": ("restart", "restart of a rank"),
    "notebook": ("check",),
    "rank 0": ("printing", "no-wait"),
    "rank 1": ("push and pull", "async", "evaluation"),
    "fork server": ("stop",),
    "run folder": ("hogwild", "start"),
}
RANK = "Rank 1 was killed by SIGKILL. Run %ddp_start -n 3 or %ddp_restart --ranks 1."
SERVER = "The cluster has ended: the fork server was killed by SIGKILL. Run %ddp_restart."
FRAME = 'File "ddpnb/cluster/link.py", line 9'


def test_a_session_survives_a_fault_in_most_phases(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DDPNB_PRELOAD", "torch._dynamo")  # new ranks need not import it
    cases = []
    for target, phases in TARGETS.items():
        for number, phase in enumerate(phases):
            kinds = KINDS.get(target, ["SIGKILL", "SIGABRT", "SIGSEGV"])
            fault = Fault([target], kinds[number % len(kinds)], 0.2, 0.0)
            cases.append(Case(0, len(cases), phase, 2, [fault]))
    ended = run_groups([cases[n::3] for n in range(3)], tmp_path, 3)
    assert not [[str(case), *case.transcript] for case in ended if case.found]


def test_judges_accept_good_messages_and_find_each_violation() -> None:
    def cell(**output: object) -> Cell:
        return Cell(request="", outputs=[output])

    printed = cell(type="stream", name="stdout", text="[0-1] a\n[0] b\n")
    assert judges.commands(RANK) == ["%ddp_restart --ranks 1", "%ddp_start -n 3"]
    assert not judges.unclear(cell(type="error", ename="UserError", traceback=[RANK]))
    assert judges.unclear(cell(type="error", ename="UserError", traceback=[RANK, RANK]))
    assert judges.unclear(cell(type="error", ename="RuntimeError", traceback=[RANK]))
    assert not judges.internals(f"{FRAME} in run", "the report of a crash")
    assert judges.internals(f"{FRAME}, in run", "a traceback")
    assert not judges.missing_output(printed, 1, 2)
    assert judges.missing_output(printed, 2, 2)
    assert not judges.false_blame(RANK, {"rank 1": "SIGKILL"}, is_sure=True)
    assert judges.false_blame(RANK, {"rank 1": "SIGTERM"}, is_sure=True)
    assert judges.false_blame(RANK, {"rank 0": "SIGKILL"}, is_sure=False)
    assert judges.false_blame(RANK, {"fork server": "SIGTERM"}, is_sure=False)
    assert judges.false_blame(f"{RANK} {SERVER}", {"rank 1": "SIGKILL"}, is_sure=False)
    assert not judges.false_blame(SERVER, {"fork server": "SIGTERM"}, is_sure=True)
    assert not judges.lost_variables({0: True, 1: False}, RANK, [])
    assert judges.lost_variables({0: False, 1: True}, RANK, ["%ddp_restart --ranks 1"])
    assert not judges.lost_variables({0: False}, "", ["%ddp_restart"])

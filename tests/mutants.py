"""Puts twenty-seven faults into a copy of ddpnb, one at a time. The tests must catch each fault.

``python -m tests.mutants`` makes all faults one after the other. ``python -m tests.mutants 3 7``
makes only faults 3 and 7.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_SECONDS = 120


MUTANTS = """
a ring of four ranks passes on one sum too few
rank/strategies/ring_by_hand.py
- _exchange(mine, theirs, rank, world_size)
+ _ = shift > 1 or _exchange(mine, theirs, rank, world_size)
tests/rank/test_conformance.py -k 'several and ring-by-hand'

micro-batches of unequal size have the same weight
rank/worker.py
- share=size / self.num_rows, is_last
+ share=1 / num, is_last
tests/rank/test_conformance.py -k 'several and central'

DiLoCo's outer optimizer uses plain momentum instead of Nesterov's
rank/strategies/diloco.py
- nesterov=self.outer_momentum > 0
+ nesterov=False
tests/rank/test_periodic.py -k nesterov

gradients of shards of unequal size have the same weight
rank/strategies/async_ps.py
- add_(gradient, alpha=weight)
+ add_(gradient)
tests/rank/test_conformance.py -k async

the correction of a stale gradient has the wrong sign
rank/strategies/async_ps.py
- mine - theirs, value=strength
+ theirs - mine, value=strength
tests/unit/rank/test_servers.py

a dead worker's shard counts as lost twice
rank/servers/queue.py
- self.lost_shards.extend(worker.shards)
+ self.lost_shards.extend(worker.shards * 2)
tests/unit/rank/test_servers.py -k lost_once

a sum in shared memory leaves out one of four ranks
rank/collectives/shared_memory.py
- for rank in around[1:]:
+ for rank in around[1:3]:
tests/rank/test_shared_sum.py

calls with tensors of different types count as equal
rank/collectives/mismatch.py
- f"{name} {kind}".encode()
+ name.encode()
tests/faults/test_collective_checks.py -k 'nothing_is_lost and type'

a call counts the bytes of its tensor instead of its messages
rank/clock.py
- sent=cost.sent, received=cost.received
+ sent=call.num_bytes, received=call.num_bytes
tests/rank/test_trace.py -k every_call

the root of a reduce is any rank
rank/collectives/table.py
- - root) % num_ranks
+ + root) % num_ranks
tests/rank/test_trace.py -k 'same_bytes and 4'

a message that is under way hides nothing
rank/clock.py
- call.notes.pop(self), self.moment()
+ self.moment(), self.moment()
tests/unit/rank/test_clock.py -k agree

an emulated all-reduce has one message too many
protocol/costs.py
- return Cost(2 * (num - 1), around, around, around)
+ return Cost(2 * num - 1, around, around, around)
tests/rank/test_emulation.py -k 'its_messages and ddp-2'

every epoch uses the first epoch's order
rank/tasks/batches.py
- permutation(self.num_in_split, self.seed + epoch)
+ permutation(self.num_in_split, self.seed)
tests/unit/rank/test_batches.py

a comparison's cell overwrites the user's variables
rank/tasks/cell.py
- scope = dict(namespace)
+ scope = namespace
tests/unit/rank/test_validation.py -k users_variables

ddpnb accepts a loss that is a sum over the samples
rank/training/model_checks.py
- loss_of(times=2)
+ loss_of()
tests/unit/rank/test_validation.py -k 'each_mistake and sum'

a smaller last batch has the weight of a full batch in a score
rank/training/evaluation.py
- + value * num
+ + value * num_chosen / 2
tests/rank/test_tasks.py -k every_sample_counts

a sleeping rank reports that it waits in a call
rank/status.py
-         call=call,
+         call=call or 'sleep',
tests/faults/test_diagnosis.py -k sleeps

ddpnb never finds a receive that no rank sends to
cluster/hangs.py
- return is_there and
+ return is_there and now.peer is None and
tests/faults/test_diagnosis.py -k recv

local ranks on the second host continue the first host's numbers
cluster/placement.py
- str(rank - neighbours[0])
+ str(rank)
tests/unit/session/test_plan.py

a rank that was killed by a signal seems to have exited
forkserver/server.py
- yield member, os.waitstatus_to_exitcode(status)
+ yield member, abs(os.waitstatus_to_exitcode(status))
tests/faults/test_death.py -k cause

every repeat begins with the same strategy
session/comparison_spec.py
- names[(position + turn) % len(names)]
+ names[position]
tests/unit/session/test_comparison_spec.py -k repeat

a magic accepts abbreviated options
magics/arguments.py
- parser.allow_abbrev = False
+ parser.allow_abbrev = True
tests/unit/session/test_comparison_spec.py -k wrong_line

an update's loss is the mean over ranks instead of samples
results/curve.py
- np.bincount(step, weighted, num_steps)[made] / samples
+ np.bincount(step, values, num_steps)[made] / np.bincount(step)[made]
tests/unit/results/test_curves.py

an interval is not widened for the other claims of its sentence
results/ratios.py
- (1 - LEVEL) / 2 / num_claims
+ (1 - LEVEL) / 2
tests/unit/results/test_ratios.py

an extra line of one rank splits the merged lines of the other ranks
output/merging.py
- not ahead[rank][item] for
+ True for
tests/unit/output/test_output.py

an emulated speed is shown without brackets
reports/findings.py
- f"({text})" if row["is_emulated"]
+ text if row["is_emulated"]
tests/unit/reports/test_tables.py

a bucket is sent while the link still has another
protocol/costs.py
- begin = max(last_ready, free)
+ begin = last_ready
tests/unit/test_costs.py -k one_link
"""
"""Each mutant has a description, a file in ``ddpnb``, the text before and after, and arguments of
pytest. The arguments are a test file and, after ``-k``, a selection of its tests."""


def main() -> None:
    """Print which test catches each mutant. Exit with 1 if no test catches a mutant."""
    chosen = sys.argv[1:]
    missed = 0
    for number, mutant in enumerate(MUTANTS.split("\n\n"), start=1):
        if chosen and str(number) not in chosen:
            continue
        what, *change = mutant.strip("\n").split("\n")
        failed = first_failure(*change)
        missed += not failed
        print(f"{number:2} {what}: {failed or 'MISSED'}", flush=True)
    sys.exit(missed > 0)


def first_failure(file: str, before: str, after: str, tests: str) -> str:
    """Return the first test that fails with a mutant, or an empty text if no test fails."""
    before, after = before.removeprefix("- "), after.removeprefix("+ ")
    with tempfile.TemporaryDirectory(prefix="ddpnb-mutant-") as folder:
        for name in ("ddpnb", "tests"):
            shutil.copytree(ROOT / name, Path(folder, name))
        shutil.copy(ROOT / "pyproject.toml", folder)
        path = Path(folder, "ddpnb", file)
        source = path.read_text()
        assert source.count(before) == 1, f"{file} has changed: {before}"
        path.write_text(source.replace(before, after))
        ended = subprocess.run(
            f"{sys.executable} -m pytest -q -x --timeout {TIMEOUT_SECONDS} {tests}",
            shell=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder},
            capture_output=True,
            text=True,
        )
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")


if __name__ == "__main__":
    main()

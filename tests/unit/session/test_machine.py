"""What other programs take of this machine, against programs that do."""

import subprocess
import sys
import time

import psutil
import pytest

from ddpnb.session.machine import LEAST_SHARE, OtherPrograms, disturbance

SPIN = "import time; end = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass"


@pytest.fixture
def busy() -> psutil.Process:
    """A process that is nobody's child, and keeps a core busy."""
    command = f"{sys.executable} -c '{SPIN}' >/dev/null & echo $!"
    return psutil.Process(int(subprocess.check_output(command, shell=True)))


def test_a_busy_process_counts_unless_it_is_a_rank(busy: psutil.Process):
    program, rank = OtherPrograms([]), OtherPrograms([busy.pid])
    before = sum(busy.cpu_times()[:2])
    time.sleep(1.0)
    used = sum(busy.cpu_times()[:2]) - before
    difference = program.share() - rank.share()
    assert difference == pytest.approx(used / psutil.cpu_count(), abs=0.1)


def test_a_child_is_no_other_program():
    with subprocess.Popen([sys.executable, "-c", SPIN]) as busy:
        load, before = OtherPrograms([]), sum(psutil.Process(busy.pid).cpu_times()[:2])
        again = OtherPrograms([busy.pid])
        time.sleep(1.0)
        used = sum(psutil.Process(busy.pid).cpu_times()[:2]) - before
        assert used > 0
        assert load.share() == pytest.approx(again.share(), abs=0.1)  # it is not counted twice


def test_little_is_not_said():
    assert disturbance(LEAST_SHARE - 0.01, 2) == ""
    assert "45%" in disturbance(0.45, 2)
    assert "--devices 2" in disturbance(0.45, 2)

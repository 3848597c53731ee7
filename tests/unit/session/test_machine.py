"""What other programs take of this machine, against programs that do."""

import subprocess
import sys
import time

import psutil
import pytest

from ddpnb.session.machine import LEAST_SHARE, OtherPrograms, disturbance

SPIN = "import time; end = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass"


def test_a_busy_process_counts_unless_it_is_a_rank():
    with subprocess.Popen([sys.executable, "-c", SPIN]) as busy:
        program, rank = OtherPrograms([]), OtherPrograms([busy.pid])
        before = sum(psutil.Process(busy.pid).cpu_times()[:2])
        time.sleep(1.0)
        used = sum(psutil.Process(busy.pid).cpu_times()[:2]) - before
        difference = program.share() - rank.share()
    assert difference == pytest.approx(used / psutil.cpu_count(), abs=0.1)


def test_little_is_not_said():
    assert disturbance(LEAST_SHARE - 0.01, 2) == ""
    assert "45%" in disturbance(0.45, 2)
    assert "--devices 2" in disturbance(0.45, 2)

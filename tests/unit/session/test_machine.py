"""What other programs take of this machine, against programs that do."""

import subprocess
import sys
import time

import psutil
import pytest

from ddpnb.session.machine import LEAST_SHARE, OtherPrograms, disturbance

SPIN = "import time; end = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass"


@pytest.mark.parametrize("is_own", [False, True])
def test_a_busy_process_counts_unless_the_kernel_has_started_it(is_own: bool):
    command = f"{sys.executable} -c '{SPIN}' >/dev/null & echo $!; {'wait' if is_own else ''}"
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, text=True) as shell:
        busy = psutil.Process(int(shell.stdout.readline()))
        if not is_own:  # it is nobody's child now
            shell.wait()
        load, before = OtherPrograms(), sum(busy.cpu_times()[:2])
        everything = psutil.cpu_times()
        time.sleep(1.0)
        used = (sum(busy.cpu_times()[:2]) - before) / psutil.cpu_count()
        idle = psutil.cpu_times().idle - everything.idle
        share = load.share()
    assert used > 0
    if is_own:
        assert share <= 1 - idle / psutil.cpu_count() - used + 0.1
    else:
        assert share >= used - 0.1


def test_little_is_not_said():
    assert disturbance(LEAST_SHARE - 0.01, 2) == ""
    assert "45%" in disturbance(0.45, 2)
    assert "--devices 2" in disturbance(0.45, 2)

"""Does every synchronous strategy compute the losses that it has always computed?"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rank import golden

TIMEOUT_SECONDS = 600.0
EXPECTED = json.loads(golden.VALUES.read_text())
ALL = [(case, name) for case, (strategies, _) in golden.CASES.items() for name in strategies]


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All numbers, computed in a process of its own, whose environment pins the arithmetic."""
    path: Path = tmp_path_factory.mktemp("golden") / "values.json"
    command = [sys.executable, "-m", "tests.rank.golden", str(path)]
    subprocess.run(command, check=True, timeout=TIMEOUT_SECONDS)
    return json.loads(path.read_text())


@pytest.mark.timeout(TIMEOUT_SECONDS)
@pytest.mark.parametrize(("case", "strategy"), ALL)
def test_losses_are_the_stored_ones(computed, case, strategy):
    found, expected = computed[case][strategy], EXPECTED[case][strategy]
    assert found["losses"].keys() == expected["losses"].keys()
    for rank, losses in expected["losses"].items():
        assert found["losses"][rank] == pytest.approx(losses, abs=1e-6), rank
    assert found["final"] == pytest.approx(expected["final"], abs=1e-6)
    assert len(found["evaluations"]) == len(expected["evaluations"])
    for mine, theirs in zip(found["evaluations"], expected["evaluations"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)

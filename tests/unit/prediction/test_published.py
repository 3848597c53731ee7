"""Published efficiencies on many devices are predicted from the published step on one device.

No figure of several devices is an input. ``docs/prediction-error.md`` lists them with sources.
"""

import statistics
from pathlib import Path
from typing import NamedTuple

from ddpnb.prediction.calibrate import calibrate
from ddpnb.prediction.predict import Question, answer
from tests.unit.prediction.machines import measured

PAGE = Path(__file__).parents[3] / "docs" / "prediction-error.md"
PARAMETERS = {
    "AlexNet": 61.1e6,
    "BERT-base": 110e6,
    "Inception V3": 23.8e6,
    "ResNet-50": 25.6e6,
    "ResNet-101": 44.5e6,
    "ResNeXt-50": 25.0e6,
    "ResNeXt-101": 88.8e6,
    "VGG-16": 138.4e6,
}


class System(NamedTuple):
    """A system with published measurements."""

    name: str
    hosts: int
    """Devices on each host."""
    inside: str
    link: str
    bucket_mb: int = 25
    """Size of a bucket. Horovod's buffer has 64 MB."""
    base: int = 1
    """Number of devices that the published efficiency is relative to."""


SYSTEMS = (
    System("PyTorch, V100, 4 x 100 Gbit/s InfiniBand", 8, "NVLink-V100", "384Gbit,9.6us"),
    System("Horovod, P100, 25 Gbit/s TCP", 4, "pcie3", "25GbE", 64),
    System("Horovod, P100, 25 Gbit/s RoCE", 4, "pcie3", "24Gbit,9.6us", 64),
    System("RaySGD, V100, 100 Gbit/s TCP", 8, "NVLink-V100", "100GbE", base=8),
    System("Horovod, V100, 100 Gbit/s TCP", 8, "NVLink-V100", "100GbE", 64, 8),
    System("DLPerf, V100, InfiniBand EDR", 8, "NVLink-V100", "InfiniBand-EDR"),
    System("DLPerf's Horovod", 8, "NVLink-V100", "InfiniBand-EDR", 64),
    System("TensorFlow, DGX-1 of P100", 8, "576Gbit,3.4us", "InfiniBand-EDR"),
)


def computed(system: System, model: str, step: str, num: int) -> float:
    """Return the predicted efficiency in percent, with a constant number of samples per device."""
    strategy = f"ddp:bucket_cap_mb={system.bucket_mb}"
    question = Question(
        ranks=(system.base, num),
        strategies=(strategy,),
        link=system.link,
        ranks_per_host=system.hosts,
        inside=system.inside,
        step=step,
    )
    found = calibrate(measured(num_bytes=4 * PARAMETERS[model], variation=0.3))
    base, many = answer(found, question).points[strategy]
    return 100 * many.efficiency / base.efficiency


def test_the_page_has_what_is_computed_and_the_median_is_at_most_five_points_off():
    errors = []
    for row in PAGE.read_text().splitlines():
        cells = row.strip("| ").split(" | ")
        for system in (each for each in SYSTEMS if each.name == cells[0]):
            _, model, step, num, published, predicted = cells
            found = computed(system, model, step, int(num))
            assert predicted == f"{found:.0f} %", row
            errors.append(abs(found - float(published.removesuffix(" %"))))
    assert len(errors) == 27
    assert statistics.median(errors) <= 5

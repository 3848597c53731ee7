"""Is what others have measured on many devices predicted from their step on one?

No figure of several devices is an input: ``docs/prediction-method.md`` has each source.
"""

import statistics
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ddpnb.scaling.calibrate import calibrate
from ddpnb.scaling.predict import Question, predict
from tests.unit.scaling.machines import measured

PAGE = Path(__file__).parents[3] / "docs" / "prediction-method.md"
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
    """Where somebody has measured."""

    name: str
    hosts: int
    """Devices on each."""
    inside: str
    link: str
    bucket_mb: int = 25
    """Of what is sent at once; Horovod's buffer has 64 MB."""
    base: int = 1
    """Devices to which the published efficiency refers."""


PYTORCH = System("PyTorch, V100, 4 x 100 Gbit/s InfiniBand", 8, "NVLink-V100", "384Gbit,9.6us")
TCP = System("Horovod, P100, 25 Gbit/s TCP", 4, "pcie3", "25GbE", 64)
ROCE = System("Horovod, P100, 25 Gbit/s RoCE", 4, "pcie3", "24Gbit,9.6us", 64)
RAY = System("RaySGD, V100, 100 Gbit/s TCP", 8, "NVLink-V100", "100GbE", base=8)
RAY_HOROVOD = System("Horovod, V100, 100 Gbit/s TCP", 8, "NVLink-V100", "100GbE", 64, 8)
DLPERF = System("DLPerf, V100, InfiniBand EDR", 8, "NVLink-V100", "InfiniBand-EDR")
DLPERF_HOROVOD = System("DLPerf's Horovod", 8, "NVLink-V100", "InfiniBand-EDR", 64)
DGX = System("TensorFlow, DGX-1 of P100", 8, "576Gbit,3.4us", "InfiniBand-EDR")

P100 = {"Inception V3": "476ms/64", "ResNet-101": "536ms/64", "VGG-16": "489ms/64"}
PUBLISHED = {
    (PYTORCH, "ResNet-50", "100ms/32", 16): 96.2,
    (PYTORCH, "ResNet-101", "171ms/32", 16): 95.5,
    (PYTORCH, "ResNeXt-50", "147ms/32", 16): 93.6,
    (PYTORCH, "ResNeXt-101", "425ms/32", 16): 94.4,
    (TCP, "Inception V3", P100["Inception V3"], 16): 92.6,
    (TCP, "ResNet-101", P100["ResNet-101"], 16): 88.2,
    (TCP, "VGG-16", P100["VGG-16"], 16): 62.5,
    (TCP, "Inception V3", "430ms/64", 64): 83.3,
    (TCP, "ResNet-101", "471ms/64", 64): 88.9,
    (TCP, "VGG-16", "428ms/64", 64): 63.6,
    (ROCE, "Inception V3", P100["Inception V3"], 16): 94.1,
    (ROCE, "ResNet-101", P100["ResNet-101"], 16): 91.4,
    (ROCE, "VGG-16", P100["VGG-16"], 16): 85.3,
    (ROCE, "Inception V3", P100["Inception V3"], 128): 90,
    (ROCE, "ResNet-101", P100["ResNet-101"], 128): 90,
    (ROCE, "VGG-16", P100["VGG-16"], 128): 79,
    (ROCE, "Inception V3", P100["Inception V3"], 512): 90,
    (ROCE, "ResNet-101", P100["ResNet-101"], 512): 90,
    (ROCE, "VGG-16", P100["VGG-16"], 512): 68,
    (RAY, "ResNet-50", "360ms/128", 64): 98.4,
    (RAY_HOROVOD, "ResNet-50", "360ms/128", 64): 98.7,
    (DLPERF, "ResNet-50", "361ms/128", 32): 93.8,
    (DLPERF_HOROVOD, "ResNet-50", "353ms/128", 32): 82.0,
    (DLPERF, "BERT-base", "641ms/96", 32): 92.9,
    (DLPERF, "BERT-base", "220ms/32", 32): 80.0,
    (DGX, "VGG-16", "416ms/64", 8): 87.7,
    (DGX, "AlexNet", "171ms/512", 8): 74.6,
}
"""Percent: the rate of N devices over N / base times that of ``base``."""


@cache
def computed(system: System, model: str, step: str, num: int) -> float:
    """Return the predicted efficiency in percent, with as many samples for each device."""
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
    base, many = predict(found, question).points[strategy]
    return 100 * many.efficiency / base.efficiency


def test_the_median_is_at_most_five_points_off():
    errors = [abs(computed(*case) - found) for case, found in PUBLISHED.items()]
    assert statistics.median(errors) <= 5


def test_the_page_has_all_of_them():
    shown = [
        f"| {system.name} | {model} | {step} | {num} | {found:.0f} % | "
        f"{computed(system, model, step, num):.0f} % |"
        for (system, model, step, num), found in PUBLISHED.items()
    ]
    names = {system.name for system, *_ in PUBLISHED}
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert [row for row in rows if row.split(" | ")[0][2:] in names] == shown

"""Measurements of a fictional machine."""

from dataclasses import replace

from ddpnb.prediction.calibrate import Measured, SizeClass

FIXED, PER_SAMPLE, CROWDED = 2e-3, 70e-6, 1.1


def size_class(num_samples: int, factor: float, num_steps: int = 100) -> SizeClass:
    return SizeClass(num_samples, factor * (FIXED + PER_SAMPLE * num_samples), num_steps)


def measured(**changes: object) -> Measured:
    """Return the measurements of a comparison on two ranks and two cores that fit the model."""
    alone = (size_class(256, 1.0), size_class(100, 1.0, 25))
    together = (size_class(128, CROWDED), size_class(50, CROWDED, 25))

    def rate(group: tuple[SizeClass, ...], num: int) -> float:
        samples = sum(each.num_samples * each.num_steps for each in group)
        return num * samples / sum(each.seconds * each.num_steps for each in group)

    found = Measured(
        name="race",
        batch_size=256,
        is_weak=False,
        num_ranks=2,
        num_bytes=1.2e6,
        alone=alone,
        together=together,
        rates={"single": rate(alone, 1), "no-comm": rate(together, 2), "ddp": 17_000.0},
        backward_share=0.6,
        optimizer_seconds=3e-4,
        variation=0.0,
        device="cpu",
        cores=2,
    )
    return replace(found, **changes)

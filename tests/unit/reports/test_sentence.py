"""The exact words of a result's sentence."""

from dataclasses import replace

import pytest

from ddpnb.protocol.notation import Target
from ddpnb.results.run import Status
from tests.unit.reports.test_tables import sentence
from tests.unit.results.fake_runs import compared, ended_run, fake_comparison, fake_run, step
from tests.unit.results.test_frames import repeated


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ({}, "No run has finished yet."),
        ({"ddp": (100,)}, "ddp ran at 100 samples/s."),
        (
            {"single": (100,), "ddp": (142,)},
            "With one run each, trust only large differences; "
            "ddp reaches 1.42× the samples/s of single.",
        ),
        (
            {"single": (100, 100), "ddp": (101, 201)},
            "With at most two runs each, trust only large differences; "
            "ddp reaches 1.42× (1.01 to 2.01) the samples/s of single.",
        ),
        (
            {"single": (100, 110, 90), "ddp": (150, 210, 110)},
            "ddp may be faster or slower than single: between 0.87× and 2.64× "
            "(if 1.52× is right, --repeats 5 shows a difference with 80 % probability).",
        ),
        (
            {"zero": (1, 1, 1), "ddp": (2, 2, 2)},
            "In samples/s, ddp is 2.00× zero (95 % interval: 2.00 to 2.00).",
        ),
        (
            {
                "single": (50, 48, 45),
                "ddp": (100, 91, 91),
                "hogwild": (45, 50, 45),
                "zero": (50.7, 48.7, 45.6),
            },
            "In samples/s, ddp is 1.97× single (95 % interval: 1.69 to 2.30); "
            "for zero, the runs show no difference of 2 % or more from single; "
            "hogwild may be faster or slower than single: between 0.70× and 1.37×.",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_speeds_are_claimed_left_open_or_not_claimed(
    rates: dict[str, tuple[float, ...]], said: str
):
    assert sentence(compared(*repeated(**rates))) == said


def test_trouble_comes_first_and_emulation_last():
    runs = [fake_run("single", num_steps=20), fake_run("async", num_steps=20, nan_from=5)]
    runs[0].end(Status.STOPPED)
    found = sentence(compared(*runs, fake_run("dp", num_steps=20)))
    assert found.startswith("async's loss became NaN or infinite; single was stopped; ")
    assert found.endswith("; the speed of dp (emulated) says nothing about real devices.")


@pytest.mark.parametrize(
    ("num", "end"),
    [
        (0, ""),
        (360, ": 360 samples are too few to tell 96.1 % from 94.7 %"),
        (10_000, ", with a standard error of 0.2 points (10,000 samples) without the seeds"),
    ],
)
def test_accuracies_stand_beside_the_error_of_their_samples(num: int, end: str):
    comparison = fake_comparison(("single", "ddp", "async"))
    runs = [
        replace(run, reports=tuple(replace(each, num_held_out=num) for each in run.reports))
        for run in comparison.runs
    ]
    found = sentence(comparison.with_runs(runs))
    accuracies = "held-out accuracy is 96.1 % for single and ddp, and 94.7 % for async (one seed)"
    assert found.endswith(f"; {accuracies}{end}.")


@pytest.mark.parametrize(
    ("num_seeds", "points", "end"),
    [
        (2, 1.0, "(median of 2 seeds): 360 samples are too few to tell 94.5 % from 93.5 %"),
        (3, 4.0, "interval: -4.0 to -4.0)"),
        (5, 0.0, "(median of 5 seeds)"),
        (3, -4.0, "(median of 3 seeds): 3 seeds are too few to tell 98.5 % from 94.5 %"),
        (5, 0.4, ": these seeds show no difference of 0.5 % or more from single"),
    ],
)
def test_accuracies_of_several_seeds_have_intervals_that_include_the_seeds(
    num_seeds: int, points: float, end: str
):
    runs = []
    for repeat in range(num_seeds):
        for name, lost in (("single", 0.0), ("async", points / 100)):
            run = fake_run(name, repeat=repeat, num_steps=20)
            lost = lost if lost >= 0 or repeat else 0.0  # a negative loss is not in every repeat
            share = (0.9 + 0.09 * repeat / (num_seeds - 1)) * (1 - lost / 0.945)
            (first, *_) = run.snapshot().reports
            run.add_report(replace(first, held_out_accuracy=share, num_held_out=360))
            runs.append(run)
    assert f"{end}." in sentence(compared(*runs))


def reaching(losses: tuple[float, ...]) -> str:
    """Return the sentence about repeats with these losses, for a target loss of 0.5."""
    runs = [
        ended_run("zero", [step(i, 4.0 * (i + 1), loss) for i in range(4)], repeat=repeat)
        for repeat, loss in enumerate(losses)
    ]
    return sentence(compared(*runs), Target(value=0.5))


def test_when_a_target_was_reached_is_said_and_who_missed_it():
    reached = "a training loss of 0.5 was reached by zero after 4.00 s"
    assert reached in reaching((0.1,) * 5).lower()
    assert "zero did not reach a training loss of 0.5 in 2 of 5 repeats" in reaching(
        (0.1, 0.1, 0.1, 0.9, 0.9)
    )
    assert "zero never reached a training loss of 0.5" in reaching((0.9,) * 5)

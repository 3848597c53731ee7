"""Is the right run resumed, and do labels with options address their runs?"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpnb.history.comparison import Comparison
from ddpnb.history.model import Run, Status
from ddpnb.history.store import Store
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.session.comparison_spec import ComparisonSpec, with_checkpoints

LABEL = "Averaging:every=2,share=0.5"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Two repeats of ``single`` and of a user's own strategy, in one comparison."""
    opened = Store(tmp_path)
    specs = specs_of((LABEL,), num_repeats=2)
    opened.begin_comparison(
        Comparison(
            comparison_id="id", name="digits", created=1.0, task="digits", source="", specs=specs
        ),
        wanted_name="first",
    )
    for number, spec in enumerate(specs):
        run = Run(
            run_id=spec.run_id, name=spec.strategy, comparison="first", spec=spec, created=number
        )
        opened.begin_run("id", run.snapshot())
        opened.finish(spec.run_id, Status.FINISHED)
    yield opened
    opened.close()


def specs_of(strategies: tuple[str, ...], num_repeats: int = 1, **chosen) -> tuple[RunSpec, ...]:
    training = TrainingSpec(task="digits", **chosen)
    names = ("single", *strategies)
    spec = ComparisonSpec(
        strategies=names, training=training, num_repeats=num_repeats, baseline=False
    )
    return spec.run_specs()


def ids(store: Store, address: str) -> list[str]:
    return [run.run_id for run in store.load(address).runs]


@pytest.mark.parametrize("address", [LABEL, f"first/{LABEL}"])
def test_a_label_with_options_is_an_address(store: Store, address: str):
    assert len(ids(store, address)) == 2
    assert ids(store, f"first/{LABEL}#2") == ids(store, address)[1:]


def test_each_strategy_and_repeat_resumes_its_own(store: Store):
    wanted = specs_of((LABEL,), num_repeats=3, resume="first")
    found = with_checkpoints(wanted, (LABEL,), store)
    own, single = ids(store, LABEL), ids(store, "single")
    assert [spec.resume for spec in found] == [
        single[0],
        own[0],
        own[1],
        single[1],
        single[1],
        own[1],
    ]
    assert [spec.seed for spec in found] == [0, 0, 1, 1, 1, 1]  # each that of the run it resumes
    assert {spec.checkpoints for spec in found} == {str(store.folder / "checkpoints")}
    assert found[0].resumed == "first/single#1"
    assert found[-1].resumed == f"first/{LABEL}#2"


def test_a_baseline_that_was_not_trained_is_left_out(store: Store):
    found = with_checkpoints(specs_of((LABEL,), resume=f"first/{LABEL}#1"), (LABEL,), store)
    assert [spec.strategy for spec in found] == [LABEL]


@pytest.mark.parametrize(
    ("resume", "expected"),
    [
        ("first", f"first has no run of ddp to resume; it has: {LABEL}, single."),
        ("other", "There is no run 'other'"),
    ],
)
def test_what_is_not_there_is_one_sentence(store: Store, resume: str, expected: str):
    with pytest.raises(UserError) as caught:
        with_checkpoints(specs_of(("ddp",), resume=resume), ("ddp",), store)
    assert expected in str(caught.value)


def test_without_checkpoints_no_folder_is_named(store: Store):
    specs = specs_of(("ddp",))
    assert with_checkpoints(specs, ("ddp",), store) == specs
    assert {spec.checkpoints for spec in specs} == {""}


def test_a_ceiling_resumes_nothing(store: Store):
    training = TrainingSpec(task="digits", resume="first")
    specs = ComparisonSpec(strategies=(LABEL,), training=training).run_specs()
    found = with_checkpoints(specs, (LABEL,), store)
    assert [(spec.strategy, bool(spec.resume)) for spec in found] == [
        ("single", True),
        ("no-comm", False),
        (LABEL, True),
    ]

"""Strategies train any cell, with any kind of batch, step and metric."""

import math
import threading
from contextlib import closing

import pytest

from ddpnb.protocol.errors import UserError
from ddpnb.rank.collectives.intercept import Listener, listening
from ddpnb.rank.tasks.samples import DatasetSamples, prefetching
from ddpnb.rank.training import validation
from ddpnb.rank.training.run import Surroundings, load_run
from tests import cells
from tests.rank import runs
from tests.rank.ranks import RankFailedError, make_state
from tests.rank.runs import train_job


def check(spec):
    return validation.validate(spec, Surroundings(state=make_state(0, 2)))


def spec_of(strategy: str, source: str = cells.CELL, **changes):
    values = {"num_epochs": 1, "batch_size": 20}
    return runs.spec_of(strategy, source=source, **values | changes)


DENSE = cells.SPARSE.replace("sparse=True", "")
UNUSED = ["dp", "async", "ddp:find_unused_parameters=on"]
ALIKE: dict[str, tuple[str, str, list[str], dict]] = {
    "a step on a dict": (cells.CELL, cells.ON_A_DICT, runs.FEATURED, {"accumulate": 2}),
    "layers that a closure calls": (cells.CELL, cells.CLOSURE, ["ddp", "fsdp", "dp"], {}),
    "sparse": (DENSE, cells.SPARSE, ["dp", "ddp"], {"momentum": 0.9}),
    "batches without rows": (cells.RAGGED, cells.RAGGED, ["ddp", "fsdp", "async"], {}),
    "outputs that are no tensor": (cells.TUPLES, cells.TUPLES, ["fsdp", "dp"], {}),
    "groups by name": (cells.IN_GROUPS, cells.IN_GROUPS, [*runs.FEATURED, "zero"], {}),
    "experts that are seldom used": (cells.MIXTURE, cells.MIXTURE, UNUSED, {}),
    "processes that load": (cells.DATASET, cells.DATASET, runs.FEATURED, {"num_data_workers": 2}),
}
"""Two equivalent cells, the strategies that train the second cell, and training options."""


@pytest.mark.parametrize(
    ("case", "strategy"), [(case, name) for case in ALIKE for name in ALIKE[case][2]]
)
def test_anything_trains_as_in_one_process(ranks, case, strategy):
    plain, source, _, options = ALIKE[case]
    alone = ranks(1).call(train_job, spec_of("single", plain, **options | {"num_data_workers": 0}))
    num_ranks = 1 if strategy == "async" else 2
    found = ranks(num_ranks).call(train_job, spec_of(strategy, source, **options))
    assert runs.total_losses(found) == pytest.approx(runs.total_losses(alone), abs=1e-5)
    assert found[0][0].held_out_loss == pytest.approx(alone[0][0].held_out_loss, abs=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_unused_parameters_are_refused_where_they_are_not_allowed(strategy):
    with pytest.raises(UserError, match=r"experts\.\d\.weight"):
        check(spec_of(strategy, cells.MIXTURE))


@pytest.mark.parametrize("strategy", runs.FEATURED)
def test_what_a_step_returns_beside_the_loss_is_reported_and_no_accuracy(ranks, strategy):
    results = ranks(2).call(train_job, spec_of(strategy, cells.ON_A_DICT))
    assert math.isnan(results[0][0].held_out_accuracy)
    shares = [step.metrics["right"] for result in results for step in runs.steps_of(result)]
    assert len(shares) >= 5
    assert all(0 <= share <= 1 for share in shares)


def test_a_batch_without_rows_cannot_be_split():
    with pytest.raises(UserError, match="cannot be split"):
        check(spec_of("single", cells.RAGGED, accumulate=2))


VALIDATED = f"""{cells.CELL}
def validation_step(model, batch):
    assert not model.training and not torch.is_grad_enabled()
    return {{'loss': 3.0, 'size': torch.tensor(len(batch[0]))}}
"""
ON_OUTPUTS = f"""{cells.ON_A_DICT}
def metric(outputs, targets): return {{'number': len(outputs) + len(targets)}}
def validation_step(model, batch): return torch.ones(len(batch['y'])), batch['y']
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (cells.TUPLES, {"f1": 0.25, "size": 100}),
        (VALIDATED, {"size": pytest.approx((2 * 20 * 20 + 10 * 10) / 50)}),  # mean over samples
        (ON_OUTPUTS, {"number": 100}),
    ],
)
def test_what_a_metric_and_a_validation_step_return_is_measured(ranks, source, expected):
    report, _ = ranks(1).call(train_job, spec_of("single", source))[0]
    assert report.held_out_metrics == expected
    assert math.isnan(report.held_out_accuracy)
    assert report.final_loss < 1
    assert (report.held_out_loss == 3.0) == (source == VALIDATED)
    assert math.isfinite(report.held_out_loss)


def check_job(state, folder, path, spec):
    return validation.validate(spec, Surroundings(state=state, folder=path))


COLLECTIVE = "\nimport torch.distributed as dist\ndef {}:\n    dist.barrier()\n    return {}\n"
CALLING = {
    "a step": COLLECTIVE.format("training_step(model, batch)", "model(batch[0]).square().mean()"),
    "a metric": COLLECTIVE.format("metric(outputs, targets)", "{'number': 1.0}"),
}


class Counter(Listener):
    num = 0

    def begin(self, call) -> None:
        self.num += 1


def check_counted(state, folder, path, spec):
    with listening(Counter()) as counter:
        here = Surroundings(state=state, folder=path)
        return validation.validate(spec, here, num_calls=lambda: counter.num)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "async"])
@pytest.mark.parametrize("source", CALLING.values(), ids=CALLING)
def test_functions_that_call_collectives_are_rejected(ranks, tmp_path, source, strategy, num_ranks):
    spec = spec_of(strategy, cells.CELL + source)
    for failed in ranks(num_ranks).attempt(check_counted, tmp_path, spec):
        assert "The cell's functions call collectives, but only rank 0" in str(failed.cause)


def test_a_class_of_ones_own_needs_neither_loss_nor_optimizer(ranks, tmp_path):
    checked = ranks(2).call(check_job, tmp_path, spec_of("Gan", cells.GAN))
    assert [each.num_samples for each in checked] == [60, 60]
    result, _ = ranks(2).call(train_job, spec_of("Gan", cells.GAN))
    assert all(0 < loss < 3 for loss in runs.total_losses([result]))
    assert math.isnan(result[0].held_out_loss)
    assert runs.marks_of(result) == []
    measured = cells.GAN + "def validation_step(model, batch): return {'judged': 0.5, 'loss': 1.0}"
    (report, _), _ = ranks(2).call(train_job, spec_of("Gan", measured))
    assert (report.held_out_loss, report.held_out_metrics) == (1.0, {"judged": 0.5})


def test_a_class_of_ones_own_is_checked_in_a_shared_folder_and_with_its_weights(ranks, tmp_path):
    ranks(2).call(check_job, tmp_path, spec_of("Meets", cells.MEETS, batch_size=21))
    made = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parts[0] for path in made} == {validation.CHECKS_FOLDER}
    assert len(made) == 2


def test_a_step_that_returns_nothing_later_on_is_one_sentence(ranks):
    step = '    return {"loss"'
    source = cells.ON_A_DICT.replace(step, f"    if len(scores) == 20: return\n{step}")
    with pytest.raises(RankFailedError, match=r"UserError: training_step\(model, batch\)"):
        ranks(1).call(train_job, spec_of("single", source))


def augmented_job(state, folder, seed):
    """Return the random inputs of this rank's first step."""
    source = cells.DATASET.replace("return self.inputs[i],", "return torch.randn(4),")
    spec = spec_of("ddp", source, seed=seed, num_data_workers=2)
    context = load_run(spec, Surroundings(state=state))
    with closing(context.strategy()) as strategy:
        strategy.setup(context.worker("t", num_steps=1))
        with context.source(strategy.shards()) as source:
            _, (inputs, _) = next(source)
    return inputs.tolist()


LOADED = cells.DATASET.replace(
    "return Own(100 if split",
    """return torch.utils.data.DataLoader(
        Own(100), num_workers=2, worker_init_fn=begin, generator=torch.Generator(), drop_last=True,
        multiprocessing_context="spawn", prefetch_factor=3, timeout=50)
def begin(number):
    info = torch.utils.data.get_worker_info()
    assert info.id == number
    info.dataset.inputs = torch.full((100, 4), 10.0 + number)
def unused(split):
    return Own(100 if split""",
)
"""A cell with a DataLoader whose processes change their copy of the data set."""


def loaded_job(state, folder):
    """Return the first inputs of this rank, and the notes on the DataLoader."""
    context = load_run(spec_of("ddp", LOADED), Surroundings(state=state))
    with closing(context.strategy()) as strategy:
        strategy.setup(worker := context.worker("t", num_steps=2))
        with context.source(strategy.shards()) as source:
            found = [inputs[0, 0].item() for _, (inputs, _) in source]
    return found, worker.num_prefetched, context.task.notes


def test_processes_have_the_settings_of_the_loader_and_a_note_names_the_others(ranks):
    found, num_prefetched, notes = ranks(1).call(loaded_job)[0]
    assert found == [10.0, 11.0]
    assert num_prefetched == 6
    assert "ddpnb ignores generator, drop_last of the DataLoader" in " ".join(notes)


def test_data_that_processes_cannot_load_are_one_sentence(monkeypatch):
    monkeypatch.setenv("DDPNB_PORTABLE", "1")
    locked = DatasetSamples([threading.Lock()])
    with pytest.raises(UserError, match=r"cannot load.*cannot pickle.*Remove --data-workers"):
        prefetching(locked, [], 1, seed=0).__enter__()


def test_processes_draw_other_random_numbers_on_each_rank_and_for_each_seed(ranks):
    drawn = [str(inputs) for seed in (0, 1) for inputs in ranks(2).call(augmented_job, seed)]
    assert len(set(drawn)) == len(drawn) == 4
    assert [str(inputs) for inputs in ranks(2).call(augmented_job, 1)] == drawn[2:]

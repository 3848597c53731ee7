import base64
import re
from pathlib import Path

import pytest

from tests.cells import COMPARED
from tests.kernel.client import Cell, Kernel, both


@pytest.fixture(scope="module")
def compared(kernel_of_module: Kernel) -> Cell:
    """The cell of a comparison of several strategies, which several tests check."""
    cell = kernel_of_module.run(
        "%ddp_compare dp ddp async --task digits --epochs 1 --name small", timeout=120
    ).passed
    kernel_of_module.run("small = _")
    return cell


def test_a_comparison_ends_as_one_sentence_one_picture_and_one_table(compared: Cell):
    assert len(compared.outputs) == 3
    assert len(compared.pictures) == 1
    (sentence, html) = compared.bundles("text/html")
    assert "samples/s" in sentence
    assert html.count("<table") == 2  # one table is folded
    assert compared.num_updates >= 4  # the figure was redrawn during the training
    for strategy in ("single", "dp (emulated)", "ddp", "async"):
        assert re.search(rf"^{re.escape(strategy)} ", compared.text, re.MULTILINE)


def test_the_results_methods(compared: Cell, kernel: Kernel):
    (output,) = kernel.run("small").outputs
    assert set(output["data"]) == {"text/plain", "text/html"}
    kernel.run("frame = small.runs().set_index('strategy')")
    names = kernel.value("sorted(frame.index)")
    assert names == "['async', 'ddp', 'dp', 'no-comm', 'single']"
    assert kernel.value("[*frame.index[frame.final_loss.isna()]]") == "['no-comm']"
    assert kernel.value("len(small.steps()) >= 4 * 5") == "True"
    assert "samples/s" in kernel.run("print(small.table())").stdout
    assert len(kernel.run("small.plot()").pictures) == 1
    assert "<table" in kernel.run("small.table()").bundles("text/html")[0]
    kernel.run("small.save('saved/small.html')")
    assert (kernel.folder / "saved" / "small.html").stat().st_size > 500


def test_each_strategy_is_compared_at_its_best_learning_rate(kernel: Kernel):
    line = "ddp async --task digits --epochs 0.5 --batch-size 64 --lr 0.001,0.1 --repeats 2"
    line += " --no-baseline --devices 2 --compute 1ms/sample,2ms --eval-samples 90 --name tuned"
    shown = kernel.run(f"tuned = %ddp_compare {line}")
    assert "best of 2 lr" in shown.text
    frame = "tuned.runs()"
    runs = f"sorted(zip({frame}.strategy, {frame}.repeat, {frame}.learning_rate))"
    assert kernel.value(runs) == str(
        [
            *[("async", 1, 0.001), ("async", 1, 0.1), ("async", 2, 0.1)],
            *[("ddp", 1, 0.001), ("ddp", 1, 0.1), ("ddp", 2, 0.1)],
        ]
    )
    assert kernel.value("type(tuned.model('ddp')).__name__") == "Sequential"
    kernel.run(f"first = {frame}.query('repeat == 1')")
    best = "first.loc[first.groupby('strategy').held_out_loss.idxmin()]"
    assert kernel.value(f"{best}.is_compared.tolist()") == "[True, True]"
    assert kernel.value("first.is_compared.sum() == 2") == "True"
    kernel.run(
        "one = %ddp_compare ddp --task digits --epochs 0.5 --batch-size 64 --lr 0.1 "
        "--no-baseline --devices 2 --compute 1ms/sample,2ms --eval-samples 90"
    )
    same = "first.query('strategy == \"ddp\" and is_compared').held_out_loss.item()"
    assert kernel.value(f"{same} == one.runs().held_out_loss.item()") == "True"
    stored = "ddpnb.load('tuned').comparison"
    kernel.run("import ddpnb")
    assert kernel.value(f"(len({stored}.runs), len({stored}.other_rates))") == "(4, 2)"


def test_what_emulated_devices_need_is_said(kernel: Kernel):
    line = "ddp --task digits --epochs 0.5 --devices 2 --slow 1:3x --eval-samples 90"
    measured = kernel.run(f"%ddp_compare dp {line} --name slowed")
    assert "2 emulated devices; losses are real" in measured.text
    assert "dp (emulated)" not in measured.text
    assert "was trained with --slow" in kernel.run("%ddp_predict --run slowed").error_text
    refused = kernel.run(f"%ddp_compare {line.replace('--devices 2', '--devices 8')}").error_text
    assert "--devices 8 needs 8 ranks, but the cluster has 2. Run %ddp_restart -n 8" in refused
    lonely = kernel.run("%ddp_compare ddp --task digits --compute 1ms/sample").error_text
    assert "--compute needs emulated devices" in lonely


CLOSENESS = {
    "single": 0.001,
    "dp": 0.001,
    "ddp": 0.005,
    "zero": 0.005,
    "local-sgd": 0.02,
    "async": 0.05,
}
"""The largest relative difference between a strategy's emulated rate and its prediction."""


def test_a_prediction_goes_through_the_points_of_emulated_devices(kernel: Kernel):
    devices = "--devices 2xV100 --as resnet50 --link 10Gbit,30us"
    given = "--task digits --epochs 2 --batch-size 64 --eval-samples 90 --name cards"
    assert kernel.run(f"%ddp_compare {' '.join(CLOSENESS)} {given} {devices}").passed
    kernel.run("import ddpnb\nfound = ddpnb.predict('1,2,4', run='cards')")
    kernel.run("seen = found.prediction.measured")
    kernel.run("at = {name: row[1] for name, row in found.prediction.points.items()}")
    kernel.run("at['single'] = found.prediction.points['ddp'][0]")
    ratios = kernel.value("{name: seen[name] / at[name].samples_per_second for name in at}")
    for name, ratio in eval(str(ratios)).items():
        assert ratio == pytest.approx(1, abs=CLOSENESS[name]), name
    assert kernel.run("found").text.count("Computed for the devices of cards: 2 emulated V100") == 1


def test_the_cell_form_and_assignment(kernel: Kernel):
    cell = kernel.run(COMPARED).passed
    assert [len(cell.bundles(m)) for m in ("image/png", "text/html")] == [1, 2]
    assert kernel.value("sorted(_.runs().strategy)") == "['ddp', 'no-comm', 'single']"
    line = kernel.run(
        "mine = %ddp_compare ddp --task synthetic --epochs 0.1 --repeats 2 --no-baseline"
    )
    assert len(line.outputs) == 3
    assert kernel.value("list(mine.runs().strategy)") == "['ddp', 'ddp']"
    assert kernel.value("mine.runs()[['repeat', 'seed']].values.tolist()") == "[[1, 0], [2, 1]]"


def test_the_cell_sees_the_ranks_variables_and_leaves_its_own_behind(kernel: Kernel):
    kernel.run("%%ddp\nnum_inputs = 4\nmodel = 'a variable of mine'")
    assert kernel.run(COMPARED.replace("Linear(4, 2)", "Linear(num_inputs, 2)")).passed
    assert kernel.run("%%ddp\nmodel").by_rank == both("'a variable of mine'")


WRONG = {
    "option": ("--epochs 1", "--epoxs 1", "did you mean --epochs?"),
    "cell": ("Linear(4, 2)", "Linear(5, 2)", "model(inputs) failed on a batch"),
    "target": ("--epochs 1", "--target accuracy=0.9 --eval-every 0", "Remove --eval-every 0"),
    "rates": (
        "--name lines\n",
        "--lr 0.1,0.2\ndef optimizer(params): ...\n",
        "Several values of --lr need the default optimizer, but the cell defines optimizer(params)",
    ),
    "sizes": ("96, 4", "96 + rank, 4", "has 96 samples on rank 0 and 97 samples on rank 1"),
    "ranks": ("--epochs 1", "--slow 7:3x", "There is no rank 7. The ranks are 0-1"),
}
"""Mistakes in a cell: the text to replace, the new text, and a part of the error."""


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_trained_is_one_sentence_before_anything_trains(
    unharmed: Kernel, wrong: tuple[str, str, str]
):
    before = unharmed.run("%ddp_runs").text
    old, new, expected = wrong
    assert old in COMPARED
    cell = unharmed.run(COMPARED.replace(old, new))
    assert expected in cell.refusal
    assert not cell.pictures
    assert unharmed.run("%ddp_runs").text == before


@pytest.mark.parametrize(
    ("new", "expected"), [("1 / 0", "ZeroDivisionError"), ("(", "SyntaxError")]
)
def test_an_error_in_the_cell_shows_the_users_lines_only(kernel: Kernel, new: str, expected: str):
    cell = kernel.run(COMPARED.replace("nn.Linear(4, 2)", new))
    assert cell.error == "RankError"
    assert expected in cell.error_text
    assert "ddpnb/" not in cell.error_text
    assert new in cell.error_text
    assert f"Cell In[{cell.number}], line 6" in cell.error_text


def test_a_held_out_curve_is_drawn_stored_and_searched_for_a_target(compared: Cell, kernel: Kernel):
    cell = kernel.run(
        "%ddp_compare ddp async --task digits --epochs 1 --eval-every 0.25 --target accuracy=20% "
        "--name curves",
        timeout=120,
    ).passed
    assert "to 20 % held-out accuracy" in cell.text
    assert re.search(r"20 % held-out accuracy was reached by [\w-]+ after [\d.]+ s", cell.text)
    kernel.run("curves = _")
    found = "curves.evaluations().groupby('strategy')"
    assert kernel.value(f"sorted({found}.groups)") == "['async', 'ddp', 'single']"
    # In an asynchronous run, rank 0 makes copies between two of its steps, which may be few.
    assert kernel.value(f"{found}.size()[['ddp', 'single']].to_list()") == "[3, 3]"
    last = f"{found}.accuracy.last().to_dict()"
    scores = "curves.runs().set_index('strategy').held_out_accuracy.dropna().to_dict()"
    assert kernel.value(f"{last} == {scores}") == "True"
    stored = "__import__('ddpnb').plot('curves').evaluations()"
    assert kernel.value(f"{stored}.equals(curves.evaluations())") == "True"
    titles = "[axes.get_title('left') for axes in curves.plot().figure.axes]"
    assert "Held-out accuracy by time, s" in kernel.value(titles)
    (picture,) = cell.pictures
    (alone,) = kernel.run("%ddp_plot curves").pictures
    assert height_of(picture) == height_of(alone)


def height_of(png: str) -> int:
    return int.from_bytes(base64.b64decode(png)[20:24])


def test_a_hand_written_loop_is_a_run_too(compared: Cell, kernel: Kernel):
    cell = kernel.run(
        "%%ddp --name mine\nimport time, ddpnb\ntime.sleep(.5)\n"
        "for i in range(20):\n    ddpnb.log(loss=1 / (i + 1), samples=8)\n    time.sleep(.01)"
    ).passed
    assert len(cell.pictures) == 1
    assert kernel.value("len(__import__('ddpnb').plot('mine').steps())") == "40"
    first = "__import__('ddpnb').plot('mine').steps().seconds.min()"
    assert float(kernel.value(first)) < 0.4  # the clock starts at the loop
    curve = "__import__('ddpnb').plot('mine').comparison.runs[0].curve"
    assert kernel.value(f"bool(max({curve}.mean[10:]) < 0.5)") == "True"  # no rank starts later
    both = kernel.run("%ddp_plot mine small/ddp")
    assert len(both.outputs) == 3
    assert len(both.pictures) == 1
    text = both.bundles("text/plain")[-1]
    assert re.search(r"^(mine/)?mine ", text, re.MULTILINE)
    assert re.search(r"^small/ddp ", text, re.MULTILINE)
    lost = kernel.run("%%ddp\nimport ddpnb\nddpnb.log(loss=1)")
    assert "Start the cell with %%ddp --name NAME" in lost.error_text


def test_a_check_is_announced_and_a_failed_one_leaves_its_error_alone(shared_kernel: Kernel):
    slow = "import time\ndef model():\n    time.sleep(1)\n    return missing\n"
    cell = shared_kernel.begin(f"%%ddp_compare ddp --no-baseline\n{slow}def data(split): 1 / 0")
    shared_kernel.wait_for_text(cell, "Checking the model and the data on 2 ranks")
    assert shared_kernel.wait(cell).error == "RankError"
    assert "Checking" not in cell.text


def test_a_module_that_was_edited_is_loaded_anew_for_a_comparison(kernel: Kernel, tmp_path: Path):
    source = (
        "def made():\n    import torch\n    return torch.nn.Sequential(torch.nn.Linear(8, {}))\n"
    )
    (tmp_path / "edited_model.py").write_text(source.format("2"))
    reload = "%%ddp\n%load_ext autoreload\n%autoreload 2\nimport sys\n"
    load = f"sys.path.insert(0, {str(tmp_path)!r})\nimport edited_model"
    assert kernel.run(reload + load).passed
    (tmp_path / "edited_model.py").write_text(source.format("2), torch.nn.Linear(2, 2"))
    compared = "%%ddp_compare ddp --no-baseline --epochs 1 --batch-size 32 --name edited\n"
    assert kernel.run(
        compared
        + "import torch, edited_model\ndef model():\n    return edited_model.made()\n"
        + "def data(split):\n    return torch.ones(64, 8), torch.zeros(64, dtype=torch.long)\n"
    ).passed
    assert kernel.value("_.runs().num_parameters.tolist()") == "[24]"
    kernel.run("%%ddp\n%autoreload 0\nsys.path.pop(0)")

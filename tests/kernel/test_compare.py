import base64
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from tests.kernel.client import ANSI, Cell, Kernel, both

CELL = """%%ddp_compare ddp --epochs 1 --batch-size 32 --name lines
import torch
from torch import nn

def model():
    return nn.Linear(4, 2)

def data(split):
    generator = torch.Generator().manual_seed(len(split))
    inputs = torch.randn(96, 4, generator=generator)
    return inputs, (inputs.sum(1) > 0).long()
"""


@pytest.fixture(scope="module")
def compared(shared_kernel: Kernel, kernel_module: Kernel) -> Cell:
    """One comparison of all strategies, that several tests look at."""
    cell = kernel_module.run(
        "%ddp_compare dp ddp async --task digits --epochs 1 --name small", timeout=120
    )
    assert not cell.error, cell.error_text
    kernel_module.run("small = _")
    return cell


@pytest.fixture(scope="module")
def kernel_module(shared_kernel: Kernel) -> Kernel:
    shared_kernel.run("%ddp_auto off\n%ddp_stop\n%ddp_start -n 2 --device cpu")
    return shared_kernel


def test_a_comparison_ends_as_one_picture_and_one_table(compared: Cell):
    assert len(compared.outputs) == 2
    assert len(compared.bundles("image/png")) == 1
    (html,) = compared.bundles("text/html")
    assert html.count("<table") == 1
    assert compared.num_updates >= 4  # it was drawn while it trained
    text = compared.text
    for strategy in ("single", "dp (emulated)", "ddp", "async"):
        assert re.search(rf"^{re.escape(strategy)} ", text, re.MULTILINE)
    for column in ("samples/s", "speed-up", "efficiency", "final loss", "accuracy", "staleness"):
        assert column in text
    assert "emulated on CPU threads" in text


def test_the_result_is_the_cells_value_and_not_shown_twice(compared: Cell, kernel: Kernel):
    assert kernel.value("type(small).__name__") == "ComparisonResult"
    again = kernel.run("small")
    (output,) = again.outputs
    assert {"text/plain", "text/html", "image/png"} <= set(output["data"])


def test_efficiency_is_that_of_the_machine_times_that_of_communication(
    compared: Cell, kernel: Kernel
):
    text = compared.text
    parted = re.search(r"^ddp .* \(\d+ % × \d+ %\)", text, re.MULTILINE)
    assert parted or "no-comm was measured slower than" in text  # as on a machine that is busy
    (ceiling,) = re.findall(r"^no-comm .*$", text, re.MULTILINE)
    assert "100 %" in ceiling
    assert "the runs took less than 4 s, which is too short to time" in text
    frame = "small.to_frame().set_index('strategy')"
    product = f"({frame}.machine * {frame}.communication - {frame}.efficiency).abs().max() < 1e-9"
    if parted:
        assert "efficiency = machine × communication" in text
        assert kernel.value(product) == "True"
    assert kernel.value(f"{frame}.final_loss.isna()['no-comm']") == "True"  # it was not judged
    assert kernel.value(f"{frame}.machine.isna()['single']") == "True"


def test_the_results_methods(compared: Cell, kernel: Kernel):
    assert (
        kernel.value("sorted(small.to_frame().strategy)")
        == "['async', 'ddp', 'dp', 'no-comm', 'single']"
    )
    assert kernel.value("len(small.steps()) >= 4 * 5") == "True"
    assert "samples/s" in kernel.run("print(small.table())").stdout
    assert len(kernel.run("small.plot()").bundles("image/png")) == 1
    assert "<table" in kernel.run("small.table()").bundles("text/html")[0]
    kernel.run("small.save('saved')")
    for name in ("comparison.html", "comparison.png", "comparison.csv"):
        assert (kernel.folder / "saved" / name).stat().st_size > 500


def test_all_start_from_the_same_weights_and_see_the_same_samples(compared: Cell, kernel: Kernel):
    first = kernel.value(
        "small.steps().query('step == 0 and strategy != \"async\"')"
        ".groupby('strategy').loss.mean().round(4).nunique()"
    )
    assert first == "1"


def test_each_strategy_is_compared_at_its_best_learning_rate(kernel: Kernel):
    line = "ddp async --task digits --epochs 1 --batch-size 64 --lr 0.001,0.1 --repeats 2"
    line += " --no-baseline --devices 2 --compute 1ms/sample,2ms --eval-samples 90 --name tuned"
    shown = kernel.run(f"tuned = %ddp_compare {line}")
    assert "each at its best of 2 learning rates by held-out loss" in shown.text
    frame = "tuned.to_frame()"
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
        "one = %ddp_compare ddp --task digits --epochs 1 --batch-size 64 --lr 0.1 "
        "--no-baseline --devices 2 --compute 1ms/sample,2ms --eval-samples 90"
    )
    same = "first.query('strategy == \"ddp\" and is_compared').held_out_loss.item()"
    assert kernel.value(f"{same} == one.to_frame().held_out_loss.item()") == "True"
    stored = "ddpnb.load('tuned').comparison"
    kernel.run("import ddpnb")
    assert kernel.value(f"(len({stored}.runs), len({stored}.other_rates))") == "(4, 2)"


def test_learning_rates_cannot_be_tried_with_an_optimizer_of_ones_own(kernel: Kernel):
    own = "\ndef optimizer(params):\n    return torch.optim.SGD(params, lr=0.1)\n"
    refused = kernel.run(CELL.replace("--name lines", "--lr 0.1,0.2") + own).error_text
    assert (
        "A choice of --lr is for the default optimizer, and the cell defines optimizer" in refused
    )


def test_two_comparisons_on_emulated_devices_are_the_same(kernel: Kernel):
    line = "dp ddp async --task digits --epochs 0.5 --devices 2 --slow 1:3x --eval-samples 90"
    kernel.run(f"one = %ddp_compare {line} --compute 1ms/sample,2ms")
    kernel.run(f"two = %ddp_compare {line} --compute 1ms/sample,2ms")
    columns = "['samples_per_second', 'final_loss', 'held_out_loss', 'staleness_median']"
    same = f"one.to_frame()[{columns}].equals(two.to_frame()[{columns}])"
    assert kernel.value(same) == "True"
    measured = kernel.run(f"%ddp_compare {line} --no-baseline")
    assert "2 emulated devices; losses are real" in measured.text
    assert "dp (emulated)" not in measured.text
    refused = kernel.run(f"%ddp_compare {line.replace('--devices 2', '--devices 8')}").error_text
    assert "--devices 8 takes 8 ranks, and there are 2" in refused
    lonely = kernel.run("%ddp_compare ddp --task digits --compute 1ms/sample").error_text
    assert "--compute describes emulated devices" in lonely
    assert "was trained with --slow" in kernel.run("%ddp_predict").error_text


CLOSENESS = {
    "single": 0.001,
    "dp": 0.001,
    "ddp": 0.005,
    "central": 0.001,
    "zero": 0.005,
    "fsdp": 0.001,
    "gossip": 0.02,
    "local-sgd": 0.02,
    "async": 0.05,
}
"""How far an emulated rate may be from what is predicted."""


def test_a_prediction_goes_through_the_points_of_emulated_devices(kernel: Kernel):
    devices = "--devices 2xV100 --as resnet50 --link 10Gbit,30us"
    given = "--task digits --epochs 2 --batch-size 64 --eval-samples 90 --name cards"
    cell = kernel.run(f"%ddp_compare {' '.join(CLOSENESS)} {given} {devices}")
    assert not cell.error, cell.error_text
    kernel.run("import ddpnb\nfound = ddpnb.predict('1,2,4', run='cards')")
    kernel.run("seen = {each.strategy: each for each in found.prediction.measured}")
    kernel.run("at = {name: row[1] for name, row in found.prediction.points.items()}")
    kernel.run("at['single'] = found.prediction.points['ddp'][0]")
    ratios = kernel.value(
        "{name: seen[name].samples_per_second / at[name].samples_per_second for name in at}"
    )
    for name, ratio in eval(str(ratios)).items():
        assert ratio == pytest.approx(1, abs=CLOSENESS[name]), name
    assert kernel.run("found").text.startswith("Predicted: cards on up to 4 ranks, from 2 emulated")


def test_the_cell_form_and_assignment(kernel: Kernel):
    cell = kernel.run(CELL)
    assert not cell.error, cell.error_text
    assert len(cell.bundles("image/png")) == len(cell.bundles("text/html")) == 1
    assert kernel.value("sorted(_.to_frame().strategy)") == "['ddp', 'no-comm', 'single']"
    line = kernel.run(
        "mine = %ddp_compare ddp --task synthetic --epochs 0.1 --repeats 2 --no-baseline"
    )
    assert len(line.outputs) == 2
    assert kernel.value("list(mine.to_frame().strategy)") == "['ddp', 'ddp']"
    assert kernel.value("mine.to_frame()[['repeat', 'seed']].values.tolist()") == "[[1, 0], [2, 1]]"


def test_a_least_time_makes_all_runs_as_many_epochs_longer(kernel: Kernel):
    cell = kernel.run(
        "longer = %ddp_compare ddp local-sgd --task digits --epochs 0.2 --min-seconds 0.2 "
        "--no-baseline",
        timeout=120,
    )
    assert not cell.error, cell.error_text
    assert "epochs in place of 0.2, so that each run takes 0.2 s or more." in cell.stdout
    epochs = "longer.to_frame().num_epochs"
    assert kernel.value(f"({epochs}.nunique(), bool({epochs}.min() > 0.2))") == "(1, True)"


def test_the_cell_sees_the_ranks_variables_and_leaves_its_own_behind(kernel: Kernel):
    kernel.run("%%ddp\nnum_inputs = 4\nmodel = 'a variable of mine'")
    cell = kernel.run(CELL.replace("Linear(4, 2)", "Linear(num_inputs, 2)"))
    assert not cell.error, cell.error_text
    assert kernel.run("%%ddp\nmodel").by_rank == both("'a variable of mine'")


WRONG = {
    "no model": ("def model", "def modell", "The cell defines no model()"),
    "no data": ("def data", "def dates", "The cell defines no data()"),
    "no parameters": ("nn.Linear(4, 2)", "nn.ReLU()", "empty parameter list"),
    "not a model": ("nn.Linear(4, 2)", "5", "model() returned an int"),
    "wrapped": ("nn.Linear(4, 2)", "nn.DataParallel(nn.Linear(4, 2))", "wrapped in DataParallel"),
    "wrong shape": ("Linear(4, 2)", "Linear(5, 2)", "model(inputs) failed on a batch"),
    "wrong data": (
        "return inputs,",
        "return inputs, 0,",
        "data('train') returned a tuple with an int in it",
    ),
    "small batch": ("--batch-size 32", "--batch-size 1", "cannot be shared by 2 ranks"),
    "large batch": ("--batch-size 32", "--batch-size 999", "larger than the training split"),
    "loss is no function": ("import torch\n", "import torch\nloss = 3\n", "not a function"),
    "unknown strategy": (
        "compare ddp",
        "compare dpp asinc",
        "'dpp'; did you mean dp or ddp? There is no strategy 'asinc'; did you mean async?",
    ),
    "unknown option": (
        "--epochs",
        "--epoxs",
        "ddp_compare has no option --epoxs; did you mean --epochs?",
    ),
    "no strategy": ("compare ddp", "compare", "Name the strategies to compare"),
    "task and cell": ("compare ddp", "compare ddp --task digits", "leave one of them out"),
    "no epochs": ("--epochs 1", "--epochs 0", "--epochs must be greater than 0"),
    "wrong number": ("--epochs 1", "--epochs one", "--epochs takes a number, not 'one'."),
    "no such rank": ("--epochs 1", "--epochs 1 --slow 7:3x", "there is no rank 7; the ranks are"),
    "not a fault": ("--epochs 1", "--epochs 1 --kill 1", "Write --kill as 1@5s, rank and"),
    "resumed": ("--epochs 1", "--epochs 1 --resume none", "has no option --resume any more"),
    "judged on nothing": ("--epochs 1", "--epochs 1 --eval-samples 0", "must be at least 1"),
    "unknown class": ("compare ddp", "compare Averaging", "There is no strategy 'Averaging'"),
    "a strategy's name": ("--name lines", "--name dp", "'dp' is a strategy"),
    "no accuracy": ("--epochs 1", "--target accuracy=1.2", "--target accuracy=1.2: an accuracy is"),
    "no target": ("--epochs 1", "--target low", "--target is a training loss, e.g. 0.3, or"),
    "no evaluation": (
        "--epochs 1",
        "--target accuracy=0.9 --eval-every 0",
        "leave --eval-every 0 out",
    ),
    "no classes": (
        "ddp --epochs 1 --batch-size 32 --name lines",
        "ddp --target accuracy=0.9 --batch-size 32\ndef metric(outputs, targets): return 1.0",
        "--target accuracy=0.9: this task has no held-out accuracy",
    ),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_trained_is_one_sentence_before_anything_trains(
    kernel: Kernel, wrong: tuple[str, str, str]
):
    kernel.run("%%ddp\nkept = rank")
    before = kernel.run("%ddp_runs").text
    old, new, expected = wrong
    assert old in CELL
    cell = kernel.run(CELL.replace(old, new))
    assert cell.error == "UserError"
    assert expected in cell.error_text
    assert len(cell.error_text.splitlines()) == 1
    assert not cell.bundles("image/png")
    assert kernel.run("%ddp_runs").text == before
    assert kernel.run("%%ddp\nkept").by_rank == {0: ["0"], 1: ["1"]}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "ddp --task mnist",
            "There is no task 'mnist'; choose one of: digits, cifar10, text, synthetic.",
        ),
        ("ddp", "Nothing to train: define model() and data(split) in the cell"),
    ],
)
def test_the_line_form_says_what_is_missing(kernel: Kernel, line: str, expected: str):
    cell = kernel.run(f"%ddp_compare {line}")
    assert cell.error == "UserError"
    assert expected in cell.error_text


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("__import__('sys').exit(3)", "SystemExit"),
        ("(", "SyntaxError"),
    ],
)
def test_an_error_in_the_cell_shows_the_users_lines_only(kernel: Kernel, new: str, expected: str):
    cell = kernel.run(CELL.replace("nn.Linear(4, 2)", new))
    assert cell.error == "RankError"
    assert expected in cell.error_text
    assert "ddpnb/" not in cell.error_text
    assert new in cell.error_text
    assert f"Cell In[{cell.number}], line 6" in cell.error_text


def test_a_held_out_curve_is_drawn_stored_and_searched_for_a_target(compared: Cell, kernel: Kernel):
    cell = kernel.run(
        "%ddp_compare ddp async --task digits --epochs 2 --target accuracy=20% --name curves",
        timeout=120,
    )
    assert not cell.error, cell.error_text
    assert "to 20 % held-out accuracy" in cell.text
    assert re.search(r"20 % held-out accuracy was reached after [\d.]+ s by ", cell.text)
    kernel.run("curves = _")
    found = "curves.evaluations().groupby('strategy')"
    assert kernel.value(f"sorted({found}.groups)") == "['async', 'ddp', 'single']"
    assert kernel.value(f"int({found}.size().min()) >= 3") == "True"
    last = f"{found}.accuracy.last().to_dict()"
    scores = "curves.to_frame().set_index('strategy').held_out_accuracy.dropna().to_dict()"
    assert kernel.value(f"{last} == {scores}") == "True"
    stored = "__import__('ddpnb').plot('curves').evaluations()"
    assert kernel.value(f"{stored}.equals(curves.evaluations())") == "True"
    titles = "[axes.get_title('left') for axes in curves.plot().figure.axes]"
    assert "Held-out accuracy by time" in kernel.value(titles)
    (picture,) = cell.bundles("image/png")
    (alone,) = kernel.run("%ddp_plot curves").bundles("image/png")
    assert height_of(picture) == height_of(alone)


def height_of(png: str) -> int:
    return int.from_bytes(base64.b64decode(png)[20:24])


def test_a_hand_written_loop_is_a_run_too(compared: Cell, kernel: Kernel):
    cell = kernel.run(
        "%%ddp --name mine\nimport time, ddpnb\n"
        "for i in range(20):\n    ddpnb.log(loss=1 / (i + 1), samples=8)\n    time.sleep(.01)"
    )
    assert not cell.error, cell.error_text
    assert len(cell.bundles("image/png")) == 1
    assert kernel.value("len(__import__('ddpnb').plot('mine').steps())") == "40"
    curve = "__import__('ddpnb').plot('mine').comparison.runs[0].curve"
    assert kernel.value(f"bool(max({curve}.mean[10:]) < 0.5)") == "True"  # nobody begins behind
    both = kernel.run("%ddp_plot mine small/ddp")
    assert len(both.outputs) == 2
    assert len(both.bundles("image/png")) == 1
    text = both.bundles("text/plain")[-1]
    assert re.search(r"^(mine/)?mine ", text, re.MULTILINE)
    assert re.search(r"^small/ddp ", text, re.MULTILINE)
    lost = kernel.run("%%ddp\nimport ddpnb\nddpnb.log(loss=1)")
    assert "name one with %%ddp --name NAME" in lost.error_text


def test_a_later_kernel_reloads_the_runs_and_run_all_stops_at_an_error(
    compared: Cell, kernel: Kernel
):
    path = kernel.folder / "later.ipynb"
    cells = [
        "%load_ext ddpnb",
        "%ddp_runs",
        "%ddp_plot small",
        "_.to_frame().shape",
        "%ddp_start -n 1",
        "%%ddp\nprint('a second kernel')\n1/0",
        "never = 'reached'",
    ]
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells])
    client = NotebookClient(
        notebook,
        timeout=60,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    with pytest.raises(CellExecutionError, match="rank 0 failed: ZeroDivisionError"):
        client.execute()
    nbformat.write(notebook, path)
    saved = nbformat.read(path, as_version=4)
    nbformat.validate(saved)
    outputs = [cell.outputs for cell in saved.cells]
    runs = outputs[1][0]["data"]["text/plain"]
    assert "small/ddp" in runs
    assert "finished" in runs
    drawn = [set(output["data"]) for output in outputs[2]]
    assert sum("image/png" in mimes for mimes in drawn) == 1
    assert sum("text/html" in mimes for mimes in drawn) == 1
    assert len(drawn) == 2
    assert outputs[3][0]["data"]["text/plain"].startswith("(5, ")
    assert outputs[5][0]["text"] == "[0] a second kernel\n"
    assert outputs[5][-1]["ename"] == "RankError"
    assert "line 3" in ANSI.sub("", "\n".join(outputs[5][-1]["traceback"]))
    assert saved.cells[6].execution_count is None


def test_no_run_lands_in_the_repository(compared: Cell, project: Path):
    assert list((project / "data" / "runs").iterdir())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("%ddp_start?", ["--device", "--backend", "--threads", "auto | cpu | cuda"]),
        ("%%ddp?", ["--ranks", "--no-wait", "--name", "--timeout"]),
        ("%%ddp_compare?", ["--task", "--epochs", "--repeats", "single | dp | ddp | "]),
        ("%ddp_compare?", ["faults on purpose:", "--slow <1:3x>", "[0.05]"]),
        ("%ddp_pull?", ["--ranks", "--as", "expression"]),
        ("%ddp_stop?", ["End every process of the cluster"]),
    ],
)
def test_help_shows_what_a_magic_takes(shared_kernel: Kernel, source: str, expected: list[str]):
    (page,) = shared_kernel.run(source).payload
    text = ANSI.sub("", page["data"]["text/plain"])
    for piece in expected:
        assert piece in text


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("%ddp_st", {"%ddp_start", "%ddp_status", "%ddp_stop"}),
        ("%ddp_start --", {"--device", "--backend", "--threads"}),
        ("%ddp_start --device ", {"auto", "cpu", "cuda"}),
        ("%ddp_start --backend g", {"gloo"}),
        ("%ddp_start --engines ", {"slurm", "mpi"}),
        ("%ddp_start --profile de", {"default"}),
        ("%%ddp --n", {"--no-wait", "--name"}),
        ("%ddp_compare d", {"dp", "ddp"}),
        ("%%ddp_compare dp a", {"async"}),
        ("%ddp_compare ddp --task ", {"digits", "synthetic"}),
        ("result = %ddp_compare s", {"single"}),
        ("%ddp_compare ddp --mom", {"--momentum"}),
        ("%ddp_compare async:mo", {"async:momentum="}),
        ("%ddp_compare ddp --batch", {"--batch-size", "--batch-per-worker"}),
        ("%ddp_compare ddp --amp ", {"none", "bf16"}),
        ("%ddp_compare ddp --task synthetic:", {"synthetic:samples=", "synthetic:compute="}),
        ("%ddp_compare ddp --task synthetic:compute=1,p", {"synthetic:compute=1,parameters="}),
        ("%ddp_source ddp-b", {"ddp-by-hand"}),
        ("%ddp_auto ", {"on", "off"}),
        ("%ddp_plot sma", {"small", "small/ddp", "small/async"}),
        ("drawn = %ddp_plot sma", {"small", "small/ddp"}),
        ("%ddp_plot small --x ", {"samples", "seconds"}),
        ("%ddp_push shared_na", {"shared_name"}),
    ],
)
def test_tab_completes(compared: Cell, shared_kernel: Kernel, typed: str, offered: set[str]):
    shared_kernel.run("shared_name = 1")
    found = shared_kernel.complete(typed)
    assert offered <= set(found)
    last = typed.split(" ")[-1]
    assert all(name.startswith(last) for name in found)


def test_a_check_is_announced_and_a_failed_one_leaves_its_error_alone(shared_kernel: Kernel):
    slow = "import time\ndef model():\n    time.sleep(1)\n    return missing\n"
    request = shared_kernel.begin(f"%%ddp_compare ddp --no-baseline\n{slow}def data(split): 1 / 0")
    shared_kernel.wait_for_text(request, "Checking the model, the data and each strategy")
    cell = shared_kernel.wait(request)
    assert cell.error == "RankError"
    assert "Checking" not in cell.text


def test_tab_offers_names_first_and_says_what_each_is(shared_kernel: Kernel):
    kinds = shared_kernel.kinds("%ddp_compare ")
    words = list(kinds.values())
    assert words == sorted(words, key=["strategy", "option"].index)
    assert list(kinds)[:3] == ["single", "dp", "ddp"]
    assert kinds["--epochs"] == "option"
    assert set(shared_kernel.kinds("%ddp_compare ddp --task ").values()) == {"task"}
    assert set(shared_kernel.kinds("%ddp_start --device ").values()) == {"value"}


def test_tab_elsewhere_is_untouched(shared_kernel: Kernel):
    shared_kernel.run("shared_name = 1")
    assert shared_kernel.complete("shared_na") == ["shared_name"]
    assert "print" in shared_kernel.complete("%%ddp\npri")


def test_a_module_that_was_edited_is_loaded_anew_for_a_comparison(kernel: Kernel, tmp_path: Path):
    source = (
        "def made():\n    import torch\n    return torch.nn.Sequential(torch.nn.Linear(8, {}))\n"
    )
    (tmp_path / "edited_model.py").write_text(source.format("2"))
    reload = "%%ddp\n%load_ext autoreload\n%autoreload 2\nimport sys\n"
    load = f"sys.path.insert(0, {str(tmp_path)!r})\nimport edited_model"
    assert not kernel.run(reload + load).error
    (tmp_path / "edited_model.py").write_text(source.format("2), torch.nn.Linear(2, 2"))
    compared = "%%ddp_compare ddp --no-baseline --epochs 1 --batch-size 32 --name edited\n"
    cell = kernel.run(
        compared
        + "import torch, edited_model\ndef model():\n    return edited_model.made()\n"
        + "def data(split):\n    return torch.ones(64, 8), torch.zeros(64, dtype=torch.long)\n"
    )
    assert not cell.error, cell.error_text
    assert kernel.value("_.to_frame().num_parameters.tolist()") == "[24]"
    kernel.run("%%ddp\n%autoreload 0\nsys.path.pop(0)")

"""All output of a cell on the ranks arrives, like the output of a notebook cell."""

import random
import re
from pathlib import Path

import psutil
import pytest

from ddpnb.compat.ipykernel_internals import KEPT_BYTES, MIRROR_BYTES, SHOWN_AT_ONCE, SHOWN_END
from tests.cluster.rig import FORKS
from tests.kernel.client import Cell, Kernel, both

MEET = "import torch.distributed as dist\ndist.barrier()\n"
"""A barrier, so that the ranks show the same output at the same time."""


def displayed(cell: Cell) -> list[str]:
    return [text for text in cell.passed.bundles("text/plain") if text]


def contents(*cells: Cell) -> dict[str, str]:
    """Return the contents of the displays of cells, by their labels."""
    texts = [text for cell in cells for text in displayed(cell)]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def test_ranks_clear_their_own_output(kernel: Kernel):
    clear = "from IPython.display import clear_output\n"
    cell = kernel.run(
        f"%%ddp\n{clear}for step in range(3):\n    clear_output(wait=True)\n    print(step, rank)"
    )
    assert cell.by_rank == {0: ["2 0"], 1: ["2 1"]}
    cell = kernel.run(f"%%ddp\n{clear}print('kept', rank)\nif rank == 1: clear_output()")
    assert cell.by_rank == {0: ["kept 0"]}
    cell = kernel.run(f"%%ddp\n{clear}print('old')\nclear_output(wait=True)")
    assert cell.by_rank == both("old")  # no later output has replaced it


def test_ranks_that_clear_and_show_the_same_are_one(kernel: Kernel):
    cell = kernel.run(
        f"%%ddp\nfrom IPython.display import HTML, clear_output, display\n{MEET}"
        "for step in range(5):\n    clear_output(wait=True)\n    display(HTML(f'<b>{step}</b>'))"
    )
    assert set(cell.bundles("text/html")) == {"<b>4</b>"}


def test_cleared_displays_come_back_as_they_are_now(kernel: Kernel):
    cell = kernel.run(
        f"%%ddp\nfrom IPython.display import clear_output, display\n{MEET}"
        "if rank == 0:\n    display('old', display_id='it').update('new')\n"
        f"{MEET}if rank == 1:\n    print('x')\n    clear_output()\n    print('y')"
    )
    assert displayed(cell) == ["[0]", "'new'"]
    assert cell.by_rank[1] == ["y"]


@pytest.mark.parametrize("module", ["auto", "notebook"])
def test_bars_for_notebooks_are_text(kernel: Kernel, module: str):
    cell = kernel.run(f"%%ddp\nfrom tqdm.{module} import trange\nfor i in trange(3): pass")
    assert "100%" in displayed(cell)[0]
    assert cell.stderr == ""


def test_a_widget_is_its_text(kernel: Kernel):
    cell = kernel.run("%%rank 0\nimport ipywidgets\nipywidgets.IntSlider(3)")
    assert cell.text.split() == ["[0]", "IntSlider(value=3)"]  # ipywidgets 7 starts a new line


def test_a_display_may_change_on_one_rank_and_on_all(kernel: Kernel):
    show = "from IPython.display import display, update_display\nshown = display('a', display_id="
    # On a busy machine, the ranks may show 'a' at different times.  The update merges both.
    first = kernel.run(f"%%ddp\n{MEET}{show}True)\nshown.update('a')")
    assert displayed(first) == ["[0-1]", "'a'"]
    second = kernel.run("%%ddp\nif rank == 0: shown.update('b')")
    assert contents(first, second) == {"[0]": "'b'", "[1]": "'a'"}
    kernel.run("%%ddp\nshown.update(f'c{rank}')")
    assert contents(first, second) == {"[0]": "'c0'", "[1]": "'c1'"}
    kernel.run("%%ddp\nshown.update('d')")
    assert contents(first, second) == {"[0-1]": "'d'"}
    kernel.run("%%ddp\nif rank == 1: update_display('nowhere', display_id='unknown')")
    assert contents(first, second) == {"[0-1]": "'d'"}


def test_help_is_shown_below_the_cell(kernel: Kernel):
    cell = kernel.run("%%ddp\ndef twice(x):\n    'Returns 2x.'\ntwice?")
    assert "Returns 2x." in displayed(cell)[0]
    assert cell.by_rank == both("")  # a label
    assert "twice(x)" in kernel.run("%%ddp\n%pinfo twice").text
    assert "'Returns 2x.'" in kernel.run("%%ddp\ntwice??").text


@FORKS
def test_forked_children_print_and_warn(kernel: Kernel):
    cell = kernel.run(
        "%%ddp\nimport multiprocessing, warnings\ndef work():\n    print('below')\n"
        "    warnings.warn('careful')\nchild = multiprocessing.get_context('fork').Process("
        "target=work)\nchild.start()\nchild.join()"
    )
    assert cell.by_rank == both("below")
    assert "5: UserWarning: careful" in cell.stderr


@FORKS
def test_workers_of_a_loader_print(kernel: Kernel):
    cell = kernel.run(
        "%%ddp\nfrom torch.utils.data import DataLoader, Dataset\nclass Own(Dataset):\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, index):\n        print('item', index)\n        return index\n"
        "for _ in DataLoader(Own(), num_workers=1): pass"
    )
    assert cell.by_rank == both("item 0", "item 1")


def test_a_library_warns_again_in_the_next_cell(kernel: Kernel):
    loss = "import torch\ntorch.nn.MSELoss()(torch.ones(3, 1), torch.ones(3));"
    for _ in range(2):
        cell = kernel.run(f"%%ddp\nfor _ in range(2):\n    {loss.replace(chr(10), '; ')}")
        by_rank = cell.stderr.count("Using a target size")
        assert by_rank == (1 if "[0-1]" in cell.stderr else 2)
    kernel.run("%%ddp\nimport warnings\nwarnings.simplefilter('ignore')")
    assert kernel.run(f"%%ddp\n{loss}").stderr == ""  # the user's filter stays
    kernel.run("%%ddp\nwarnings.resetwarnings()")


@pytest.mark.parametrize("source", ["input()", "breakpoint()", "import pdb; pdb.set_trace()"])
def test_a_rank_has_no_prompt_and_says_so(kernel: Kernel, source: str):
    cell = kernel.run(f"%%ddp\n{source}\nx = 1")
    assert "A rank has no prompt here. For breakpoint()" in cell.error_text.splitlines()[0]
    assert "start the cell with %%ddp --debug 1" in cell.error_text
    assert (f"Cell In[{cell.number}], line 2" in cell.error_text) == ("pdb" not in source)
    assert ".py" not in cell.error_text  # no frame of a library


def test_much_output_keeps_its_order(kernel: Kernel):
    cell = kernel.run(
        "%%rank 0\nimport sys\nprint('x' * 300_000, flush=True)\nprint('y', file=sys.stderr)"
    )
    assert [(output["name"], len(output["text"])) for output in cell.outputs] == [
        ("stdout", 300_005),
        ("stderr", 6),
    ]
    # IPython stores outputs since version 9.
    kept = "'xxxx' in str(getattr(get_ipython().history_manager, 'outputs', ''))"
    assert kernel.run(f"%%rank 0\nprint({kept})").by_rank == {0: ["False"]}


# A kernel of these tests has two ranks.
SHOWN, SHOWN_LAST = SHOWN_AT_ONCE // 2, SHOWN_END // 2
WAYS = {
    "lines": "for line in text.splitlines(True): print(line, end='')",
    "line ends": "for line in text.splitlines(): print(line)",
    "at once": "print(text, end='')",
    "C code": "data = memoryview(text.encode())\nwhile data: data = data[os.write(1, data):]",
    "a thread": "t = threading.Thread(target=print, args=(text,), kwargs={'end': ''})\n"
    "t.start()\nt.join()",
    "errors": "sys.stderr.write(text)",
}
FLOOD = "%%rank 0\nimport os, sys, threading\ntext = ''.join(f'{{i:>9}}\\n' for i in range({}))\n"


def check_flood(kernel: Kernel, way: str, size: int) -> bool:
    """Print a text, and check that nothing is lost. Return True if a part is only in the file."""
    cell = kernel.run(FLOOD.format(size // 10) + WAYS[way]).passed
    text = "".join(f"{i:>9}\n" for i in range(size // 10))
    shown = re.sub(r"^\[0\] ", "", cell.stderr if way == "errors" else cell.stdout, flags=re.M)
    found = re.search(
        r"ddpnb left out ([\d,]+) characters here\. "
        r"(?:They are|The first ([\d,]+) of them are) in (\S+) until the next cell\.\n",
        shown,
    )
    if found is None:
        assert shown == text
        return False
    end = shown[found.end() :]
    num, kept = (int((each or found[1]).replace(",", "")) for each in found.group(1, 2))
    begin = text[: len(text) - num - len(end)]
    assert shown[: found.start()] == begin + "\n" * (not begin.endswith("\n"))
    assert text.endswith(end)
    assert len(begin) >= SHOWN - 100
    assert len(end) >= SHOWN_LAST
    middle = Path(found[3])
    assert middle.read_text() == text[len(begin) :][:kept]
    assert (kept < num) == (num > KEPT_BYTES - SHOWN_LAST and kept <= KEPT_BYTES)
    assert not kernel.run("%%ddp\n1").error
    assert not middle.exists()
    return True


@pytest.mark.parametrize("way", WAYS)
def test_of_a_flood_the_beginning_and_the_end_are_shown(kernel: Kernel, way: str):
    draw = random.Random(way)
    limit = SHOWN + draw.choice([0, 2 * SHOWN_LAST])
    check_flood(kernel, way, limit + draw.randint(-30, 30) * 10)
    usual = draw.randint(SHOWN + 6 * SHOWN_LAST, 2 * SHOWN)
    assert check_flood(kernel, way, KEPT_BYTES + usual if way in ("at once", "C code") else usual)


def test_a_flood_takes_little_memory(kernel: Kernel):
    rank = int(kernel.run("%%rank 0\nimport os\nprint(os.getpid())").by_rank[0][0])
    processes = [psutil.Process(rank), psutil.Process(kernel.manager.provisioner.pid)]
    cell = kernel.run(
        "%%ddp --no-wait\nimport os, sys\npiece = 'x' * 99 + '\\n'\n"
        "for _ in range(200):\n    print(piece * 10_000)\n"
        "    [os.write(2, piece.encode() * 100) for _ in range(100)]"
    )
    idle, peaks = [each.memory_info().rss for each in processes], [0, 0]
    while kernel.value("this_session()._running") != "[]":
        now = [each.memory_info().rss for each in processes]
        peaks = [max(pair) for pair in zip(peaks, now, strict=True)]
    assert all(peak - before < 300_000_000 for peak, before in zip(peaks, idle, strict=True))
    assert (kernel.run_folder / "0.log").stat().st_size < 2 * MIRROR_BYTES
    kernel.wait_until(lambda: cell.text.count("ddpnb left out") == 4)
    assert len(cell.text) < 3_000_000  # Jupyter's server would drop more text within 3 s
    assert kernel.run("%%ddp\nprint('next')").by_rank == both("next")


def test_characters_of_c_code_are_read_whole(kernel: Kernel):
    cell = kernel.run("%%rank 0\nimport os\nos.write(1, ('a' + 'é' * 100_000 + '\\n').encode());")
    assert cell.by_rank[0][0] == "a" + "é" * 100_000


COMPARED = """%%ddp_compare single ddp --epochs 1 --batch-size 8 --no-baseline
import torch
from torch import nn

def model():
    print("model here")
    return nn.Linear(4, 1)

def data(split):
    return torch.ones(64, 4), torch.ones(64)

def loss(outputs, targets):
    LOSS
"""


def test_what_a_comparison_prints_is_shown_below_it(kernel: Kernel):
    mean = "return nn.functional.mse_loss(outputs, targets)"
    for _ in range(2):  # warnings must appear each time
        cell = kernel.run(COMPARED.replace("LOSS", mean), timeout=120)
        assert [output["type"] for output in cell.outputs] == ["display_data"] * 3 + ["stream"]
        assert cell.lines[0] == "Printed by the cell:"
        assert all("model here" in cell.by_rank[rank] for rank in (0, 1))
        assert ".py:13: UserWarning: Using a target size" in cell.stdout


def test_a_comparison_that_is_refused_shows_what_it_printed(kernel: Kernel):
    cell = kernel.run(COMPARED.replace("LOSS", "return 3"))
    assert cell.error == "UserError"
    assert all(set(cell.by_rank[rank]) == {"model here"} for rank in (0, 1))

"""``%ddp_run`` runs an unchanged script for torchrun on the live ranks."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import IPython
import pytest

from tests.cluster.rig import ALL_REDUCE, FORKS
from tests.kernel.client import Kernel, both

TRAIN = '''"""A script as torchrun takes it."""
import argparse, os, pickle, sys
import torch
import torch.distributed as dist
import helper

class Net(torch.nn.Linear):
    pass

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--do", default="")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.ones(1)
    if args.do == "leave" and rank == 1:
        return
    if args.do == "loop":
        print("looping", flush=True)
        while True: pass
    dist.all_reduce(total if args.do != "mismatch" else torch.ones(1 + rank))
    if args.do == "raise" and rank == 1:
        raise ValueError("on purpose")
    eval(args.do if "exit" in args.do else "0")
    print(args.epochs, total.item(), helper.VALUE)
    pickle.loads(pickle.dumps(Net(1, 1)))
    os.chdir("/")
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
'''


@pytest.fixture(scope="module")
def folder(project: Path) -> Path:
    """The notebook's folder. Its ``src/train.py`` imports another file in ``src``."""
    (project / "src").mkdir()
    (project / "src" / "train.py").write_text(TRAIN)
    (project / "src" / "helper.py").write_text("VALUE = 'first'\n")
    return project


def line_of(text: str) -> int:
    return 1 + next(n for n, line in enumerate(TRAIN.splitlines()) if text in line)


@pytest.fixture(autouse=True)
def unchanged(kernel: Kernel, folder: Path) -> Iterator[None]:
    """Check that a script leaves group, variables, ``__main__``, arguments and folder as before."""
    kernel.run("%%ddp\nkept = 1")
    yield
    cell = kernel.run(
        f"%%ddp\n{ALL_REDUCE}\nimport os, sys\nprint(total.item(), kept, sys.argv, __name__, "
        "vars(sys.modules['__main__']) is globals(), os.getcwd(), 'helper' in sys.modules, "
        "any('src' in path for path in sys.path))"
    )
    assert cell.by_rank == both(f"2.0 1 [''] __main__ True {kernel.folder} False False")


def test_a_script_runs_unchanged_and_leaves_the_ranks_as_they_were(kernel: Kernel, folder: Path):
    cell = kernel.run("%ddp_run src/train.py --epochs 3")
    assert cell.by_rank == both("3 2.0 first"), cell.text
    (folder / "src" / "helper.py").write_text("VALUE = 'edited'\n")
    twin = kernel.run("import ddpnb\nddpnb.run_script('src/train.py', ['--epochs', 4])")
    assert twin.by_rank == both("4 2.0 edited")


def test_what_a_script_sees_is_what_torchrun_gives_it(kernel: Kernel, folder: Path):
    (folder / "src" / "look.py").write_text(
        "import sys, os\nfrom pathlib import Path\n"
        "print(__name__, __file__, sys.argv, sys.path[0], Path.cwd() == Path(os.environ['HERE']))\n"
        "print(sys.modules['__main__'].__file__ == __file__, 'kept' in globals(), __spec__)\n"
    )
    kernel.run(f"%%ddp\nimport os\nos.environ['HERE'] = {str(folder)!r}")
    src = folder / "src"
    cell = kernel.run("%ddp_run src/look.py a 'b c' --timeout 3 -i")
    given = "['src/look.py', 'a', 'b c', '--timeout', '3', '-i']"
    expected = f"__main__ {src / 'look.py'} {given} {src} True"
    assert cell.by_rank == both(expected, "True False None")
    module = kernel.run("%ddp_run -m src.look x")
    assert len(module.by_rank) == 2
    for seen, spec in module.by_rank.values():
        assert seen == f"__main__ {src / 'look.py'} ['{src / 'look.py'}', 'x'] {folder} True"
        assert "name='src.look'" in spec


SETTINGS = {
    "torch.set_default_dtype(torch.float64)": "torch.get_default_dtype()",
    "torch.set_num_threads(2)": "torch.get_num_threads()",
    "torch.no_grad().__enter__()": "torch.is_grad_enabled()",
    "torch.set_default_device('meta')": "torch.ones(1).device",
    "torch.autograd.set_detect_anomaly(True)": "torch.is_anomaly_enabled()",
    "torch.use_deterministic_algorithms(True)": "torch.get_deterministic_debug_mode()",
    "torch.backends.cudnn.benchmark = True": "torch.backends.cudnn.benchmark",
    "torch.set_float32_matmul_precision('high')": "torch.get_float32_matmul_precision()",
    "torch.set_flush_denormal(True)": "sys.float_info.min / 2",
    "torch.set_autocast_enabled('cpu', True)": "torch.is_autocast_enabled('cpu')",
    "torch.set_printoptions(precision=1, sci_mode=True)": "torch.tensor(1.2345, device='cpu')",
    "np.set_printoptions(precision=1)": "np.array([1.2345])",
    "np.seterr(all='raise')": "np.geterr()",
    "sys.setrecursionlimit(5000)": "sys.getrecursionlimit()",
    "sys.excepthook = threading.excepthook = max": "max in (sys.excepthook, threading.excepthook)",
    "signal.signal(signal.SIGUSR1, max)": "signal.getsignal(signal.SIGUSR1)",
    "signal.signal(signal.SIGALRM, max); signal.alarm(100)": "signal.getsignal(signal.SIGALRM)",
    "os.umask(0o77)": "(m := os.umask(0), os.umask(m))",
    "gc.disable(); socket.setdefaulttimeout(9)": "gc.isenabled(), socket.getdefaulttimeout()",
    "builtins.made = 1; builtins.bin = max": "hasattr(builtins, 'made'), bin is max",
    "logging.basicConfig(level='DEBUG', force=True)": "logging.root.level, logging.root.handlers",
    "logging.getLogger('a').addHandler(logging.NullHandler())": "logging.getLogger('a').handlers",
    "logging.disable(50)": "logging.getLogger('torch').isEnabledFor(50)",
    "warnings.simplefilter('error', BytesWarning)": "'BytesWarning' in str(warnings.filters)",
    "torch.multiprocessing.set_start_method('spawn', force=True)": (
        "torch.multiprocessing.get_start_method()"
    ),
    "sys.stdout, sys.kept = sys.stderr, sys.stdout": "sys.stdout is sys.stderr",
}
IMPORTS = (
    "import builtins, gc, logging, os, signal, socket, sys, threading, warnings\n"
    "import numpy as np, torch\n"
)


def test_its_settings_are_its_own(kernel: Kernel, folder: Path):
    (folder / "src" / "sets.py").write_text(IMPORTS + "\n".join(SETTINGS))
    shown = "\n".join(f"print({look!r}, {look})" for look in SETTINGS.values())
    (folder / "src" / "looks.py").write_text(IMPORTS + shown)

    def seen() -> list[str]:
        cell = kernel.run(f"%%ddp\n{IMPORTS}{shown}").passed
        script = kernel.run("%ddp_run src/looks.py").passed
        assert cell.by_rank[0] == cell.by_rank[1] == script.by_rank[0], cell.text
        return cell.by_rank[0]

    before = seen()
    assert len(before) == len(SETTINGS)
    assert kernel.run("%ddp_run src/sets.py").status == "ok"
    assert seen() == before
    assert kernel.run("%ddp_run -i src/sets.py").status == "ok"
    kernel.run("%%ddp\nsys.stdout = sys.kept")
    cell = kernel.run(f"%%ddp\n{shown}").passed  # the settings stay, but not for other scripts
    assert sum(map(str.__ne__, cell.by_rank[0], before)) == len(SETTINGS) - 1
    assert kernel.run("%ddp_run src/looks.py").passed.by_rank[0] == before
    kernel.run("%ddp_restart")
    kernel.run("%%ddp\nkept = 1")


def test_its_seed_and_environment_are_its_own(kernel: Kernel, folder: Path):
    (folder / "src" / "seeds.py").write_text(
        "import os, torch\nprint(torch.rand(1).item())\ntorch.manual_seed(0)\n"
        "print(os.environ.pop('OF_CELL'), os.environ.setdefault('LEFT', 'no'))\n"
    )
    kernel.run("%%ddp\nimport os, torch\nos.environ['OF_CELL'] = 'of cell'")
    runs = [kernel.run("%ddp_run src/seeds.py").by_rank for _ in range(2)]
    assert len({lines[0] for run in runs for lines in run.values()}) == 4
    assert [lines[1] for run in runs for lines in run.values()] == ["of cell no"] * 4
    cell = kernel.run("%%ddp\nprint('LEFT' in os.environ)\nprint(torch.rand(1))")
    assert cell.by_rank[0][0] == "False"
    assert cell.by_rank[0][1] != cell.by_rank[1][1]
    kernel.run("%%ddp\ndel os.environ['OF_CELL']")


ASYNC = """
import asyncio, os
async def main():
    async with asyncio.TaskGroup() as group: group.create_task(asyncio.sleep(0.01))
    return await (await asyncio.create_subprocess_exec("true")).wait()
async def nested(): return asyncio.run(main())
with asyncio.Runner() as runner: print(runner.run(main()), asyncio.run(main()))
asyncio.set_event_loop(asyncio.new_event_loop())
print(asyncio.get_event_loop().run_until_complete(main()))
for call in (asyncio.get_running_loop, lambda: asyncio.run(nested())):
    try: call()
    except RuntimeError as error: print(error)
"""


def test_coroutines_run_as_under_torchrun(kernel: Kernel, folder: Path):
    (folder / "src" / "asks.py").write_text(ASYNC)
    alone = subprocess.run([sys.executable, "src/asks.py"], cwd=folder, capture_output=True)
    assert kernel.run("%ddp_run src/asks.py").by_rank == both(*alone.stdout.decode().splitlines())


BEGINS = """
import atexit, logging, logging.handlers, multiprocessing, os, sys, tempfile, threading, time
import weakref
from concurrent import futures
from pathlib import Path
fork, made = multiprocessing.get_context("fork"), Path(f"made-{os.environ['RANK']}")
kept = sys.kept = [threading.Event()]
def write():
    time.sleep(0.2)
    made.touch()
"""
ENDS = {
    "thread": "threading.Thread(target=write).start()",
    "threads": "threading.Timer(0, lambda: threading.Timer(0.1, write).start()).start()",
    "thread pool": "kept += [futures.ThreadPoolExecutor()]; kept[1].submit(write)",
    "process pool": "kept += [futures.ProcessPoolExecutor(1, fork)]; kept[1].submit(write)",
    "process": "fork.Process(target=write).start()",
    "children": "write(); fork.Process(target=time.sleep, args=[99], daemon=True).start()",
    "leaked pool and manager": "write(); kept += [fork.Pool(1), fork.Manager()]",
    "atexit": "atexit.register(write)",
    "atexit twice": "atexit.register(atexit.register, write)",
    "atexit of a module": "import registers",
    "atexit in reverse": "[atexit.register(made.write_text, text) for text in ('', '/')]",
    "atexit that fails": "atexit.register(write); atexit.register(max)",
    "atexit that is removed": "atexit.register(max); atexit.unregister(max); write()",
    "atexit after threads": "threading.Thread(target=write).start(); atexit.register(made.stat)",
    "error": "atexit.register(write); raise ValueError",
    "exit code": "atexit.register(write); sys.exit(1)",
    "finalizer": "weakref.finalize(kept[0], write)",
    "folder": "kept += [tempfile.TemporaryDirectory()]; made.write_text(kept[1].name)",
    "log": "h = logging.handlers; logging.root.addHandler(h.MemoryHandler(9, target="
    "logging.FileHandler(made, delay=True))); logging.warning('')",
}


@FORKS
@pytest.mark.parametrize("last", ENDS.values(), ids=ENDS)
def test_its_end_is_that_of_a_process(kernel: Kernel, folder: Path, last: str):
    (folder / "src" / "registers.py").write_text(f"{BEGINS}atexit.register(write)")
    (folder / "src" / "ends.py").write_text(BEGINS + last)
    cell = kernel.run("%ddp_run src/ends.py")
    assert bool(cell.error) == (last.endswith(("ValueError", "exit(1)"))), cell.error_text
    assert bool(cell.stderr) == last.endswith("register(max)"), cell.stderr
    for made in [folder / f"made-{rank}" for rank in range(2)]:
        assert not Path(made.read_text().strip() or "none").exists()
        made.unlink()
    cell = kernel.run(
        "%%ddp\nimport multiprocessing, sys\nprint(multiprocessing.active_children())"
    )
    assert cell.by_rank == both("[]")


@pytest.mark.parametrize(
    "last",
    [
        "threading.Thread(target=kept[0].wait).start()",
        "threading.Thread(target=kept[0].wait).start(); raise ValueError",
        "atexit.register(kept[0].wait)",
        "atexit.register(time.sleep, 99); threading.Thread(target=kept[0].wait).start()",
    ],
)
def test_its_end_can_be_stopped(kernel: Kernel, folder: Path, last: str):
    (folder / "src" / "ends.py").write_text(f"{BEGINS}print('ends', flush=True)\n{last}")
    assert kernel.interrupted("%ddp_run src/ends.py", "ends").error == "KeyboardInterrupt"
    cell = kernel.run("%%ddp\nimport sys\nsys.kept[0].set()")
    assert kernel.run("%ddp_run --timeout 0.5 src/ends.py").error == "CellTimeoutError"
    cell = kernel.run("%%ddp\nsys.kept[0].set()")
    assert cell.seconds < 5


MAKES = """
import sys, weakref
import helper

class Model:
    pass

model, made = Model(), helper.VALUE
sys.kept_by = weakref.ref(model)
def show(): print(model)
"""


def test_its_variables_are_freed_or_kept(kernel: Kernel, folder: Path):
    (folder / "src" / "makes.py").write_text(MAKES)
    kernel.run("%ddp_run src/makes.py")
    assert kernel.run("%%ddp\nimport sys\nsys.kept_by()").text == ""
    assert "NameError" in kernel.run("%%ddp\nmade").error_text
    kernel.run("%ddp_run -i --ranks 1 src/makes.py")
    cell = kernel.run("%%rank 1\nmade, helper.__name__, sys.kept_by() is model, show()")
    assert "('edited', 'helper', True, None)" in cell.stdout
    kernel.run("%%rank 1\ndel sys.modules['helper']")


def test_a_failure_shows_the_scripts_lines(kernel: Kernel, folder: Path):
    cell = kernel.run("%ddp_run src/train.py --do raise")
    assert cell.error_text.startswith("RankError: rank 1 failed: ValueError: on purpose")
    raising = line_of("raise ValueError")
    is_old = IPython.version_info < (8,)  # it shows the number only in front of the line
    place = "train.py in main()" if is_old else f"train.py:{raising}, in main()"
    assert f"{folder}/src/{place}" in cell.error_text
    assert f"> {raising} " in cell.error_text
    assert "ddpnb/" not in cell.error_text


def test_a_hang_and_a_mismatch_name_the_scripts_lines(kernel: Kernel, folder: Path):
    waits = line_of("dist.all_reduce")
    cell = kernel.run("%ddp_run src/train.py --do leave")
    where = f"rank 0 waits in all_reduce (line {waits} of train.py, Float [1])"
    assert f"HangError: {where}; rank 1 finished" in cell.error_text
    cell = kernel.run("%ddp_run src/train.py --do mismatch")
    assert f"all_reduce with Float [1] (line {waits} of train.py), but rank" in cell.error_text


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit(3)", "code 3"),
        ("sys.exit('no')", "code 1: no"),
        ("sys.exit(0)", ""),
        ("exit()", ""),
    ],
)
def test_an_exit_code_other_than_0_fails_it_in_one_sentence(
    kernel: Kernel, folder: Path, end: str, said: str
):
    cell = kernel.run(f'%ddp_run src/train.py --do "{end}"')
    assert cell.error == ("RankError" if said else "")
    assert said in cell.error_text
    assert len(cell.error_text.splitlines()) == bool(said)


def test_what_is_no_script_is_refused_in_one_sentence(kernel: Kernel, folder: Path):
    (folder / "src" / "data.bin").write_bytes(b"\xff\xfe\x00")
    for line, named in {
        "": "%ddp_run train.py",
        "src/trian.py": "did you mean train.py",
        "src": "src",
        "src/data.bin": "src/data.bin",
        "--tiemout 3 src/train.py": "did you mean --timeout?",
        "-m src.nothing": "src.nothing",
    }.items():
        cell = kernel.run(f"%ddp_run {line}")
        assert named in cell.error_text
        assert len(cell.error_text.splitlines()) == 1


def test_it_can_be_stopped_and_looked_at(kernel: Kernel, folder: Path):
    cell = kernel.interrupted("%ddp_run src/train.py --do loop", "looping")
    assert cell.error == "KeyboardInterrupt"
    timed = kernel.run("%ddp_run --timeout 1 src/train.py --do loop")
    assert "took longer than 1 s and was stopped" in timed.error_text
    cell = kernel.run("%ddp_run --no-wait src/train.py --do loop")
    kernel.wait_for_text(cell, "looping")
    assert f"is at line {line_of('while True')} of train.py" in kernel.run("%ddp_why").text
    kernel.run("handle = _")
    kernel.run("%ddp_interrupt")
    assert kernel.run("handle.wait(30)").error == "KeyboardInterrupt"


LATE = """
import os, signal, sys
def late(frame, event, _):
    if event == "c_call" and frame.f_code.co_name == "process_of":
        os.kill(os.getpid(), signal.SIGINT)
sys.setprofile(late)
"""


def test_an_interrupt_as_it_ends_leaves_the_ranks_as_they_were(kernel: Kernel, folder: Path):
    (folder / "src" / "late.py").write_text(LATE)
    kernel.run("%ddp_run src/late.py a b")
    kernel.run("%%ddp\nimport sys\nsys.setprofile(None)")


def test_the_path_is_completed(kernel: Kernel, folder: Path):
    assert kernel.kinds("%ddp_run sr")["src/"] in ("path", "<unknown>")  # unknown in IPython 7
    assert "src/train.py" in kernel.complete("%ddp_run -i src/tr")
    assert "--timeout" in kernel.complete("%ddp_run --tim")

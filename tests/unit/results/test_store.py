import atexit
import dataclasses
import json
import math
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Mark, MarkKind, RunReport
from ddpnb.protocol.processes import parent_folders
from ddpnb.reports.listing import Details, runs_table
from ddpnb.reports.result import ComparisonResult
from ddpnb.results import comparison
from ddpnb.results.comparison import Comparison, magic_of
from ddpnb.results.folders import runs_folder
from ddpnb.results.frames import strategy_rows
from ddpnb.results.opening import open_store
from ddpnb.results.query import matching
from ddpnb.results.recorder import Recorder
from ddpnb.results.run import Run, Status
from ddpnb.results.store import FILE_NAME, Store, StoreError
from tests.rank.ranks import make_state
from tests.unit.results.fake_runs import batch, header, run_of, spec, step, stored


def a_comparison(number: int = 1) -> Comparison:
    return Comparison(
        comparison_id=f"id-{number}",
        name="digits",
        created=1000.0 + number,
        task="digits",
        source="def model(): ...",
        specs=(spec("ddp"),),
        environment={"torch": "2.13.0"},
    )


def keep(store: Store, strategies: tuple[str, ...], number: int = 1, repeats: int = 1) -> str:
    """Store a finished comparison, and return its name."""
    name = store.begin_comparison(a_comparison(number)).name
    for repeat in range(repeats):
        for strategy in strategies:
            run_spec = spec(strategy, repeat, name)
            run = run_of(run_spec, created=100.0 * number + repeat)
            store.begin_run(f"id-{number}", run.snapshot())
            store.append(batch(run.run_id, [step(0, 1.0)], header=header(run_spec, 1)))
            store.finish(run.run_id, Status.FINISHED)
    return name


def begun(store: Store, number: int = 1, name: str = "ddp", wanted_name: str = "") -> Run:
    """Store a comparison with one run that has not trained yet."""
    comparison = store.begin_comparison(a_comparison(number), wanted_name=wanted_name)
    run = Run(run_id=f"r{number}", name=name, spec=spec("ddp"), created=float(number))
    store.begin_run(comparison.comparison_id, run.snapshot())
    return run


@pytest.fixture
def store(tmp_path: Path):
    opened = Store(tmp_path / "runs")
    yield opened
    opened.close()


def test_a_run_comes_back_as_it_was(store: Store):
    recorder = Recorder(store, name="race", task="digits", source="def model(): ...", specs=())
    recorder.begin("r1", "async", spec("async"))
    head = header(spec("async"), 60)
    for rank in (0, 1):
        steps = [step(i, i + 1.0 + rank / 2, math.nan if i == 3 else 0.5) for i in range(30)]
        recorder.add(batch("r1", steps, rank=rank, header=head, metrics=[(2, "grad", 0.5)]))
        recorder.add_report(RunReport(run_id="r1", rank=rank, seconds=31.0))
    mark = Mark(rank=1, seconds=2.0, kind=MarkKind.CAME_BACK)
    recorder.add(batch("r1", [], sequence=1, marks=[mark]))
    recorder.end("r1", Status.FINISHED)
    loaded = store.load("race")
    (live,), (run,) = recorder.comparison.runs, loaded.runs
    assert run.events.tobytes() == live.events.tobytes()
    assert run.events.dtype == live.events.dtype
    for name in ("samples", "seconds", "mean", "lowest", "highest"):
        np.testing.assert_array_equal(getattr(live.curve, name), getattr(run.curve, name))
    assert (run.spec, run.header, run.status) == (live.spec, live.header, live.status)
    assert (run.marks, repr(run.reports)) == ((mark,), repr(live.reports))
    assert (loaded.source, loaded.task) == ("def model(): ...", "digits")
    assert loaded.environment == recorder.comparison.environment
    (now,), (later,) = strategy_rows(recorder.comparison), strategy_rows(loaded)
    assert repr(now) == repr(later)
    assert now["num_workers"] == store.list()[0].num_workers == 2


@pytest.mark.parametrize("index", [1, 99, -2])
def test_a_logged_number_of_no_row_is_damage_and_hides_no_other_row(store: Store, index: int):
    run = begun(store)
    for sequence, metrics in enumerate(([(0, "grad", 0.5)], [(index, "grad", 0.7)])):
        store.append(batch(run.run_id, [step(sequence, 1.0)], sequence=sequence, metrics=metrics))
    store.finish(run.run_id, Status.FINISHED)
    (found,) = store.load("digits-1").runs
    assert (found.detail, found.num_events) == ("a row of its batches is damaged", 1)
    assert found.last == {"grad": 0.5}
    assert len(ComparisonResult(store.load("digits-1")).runs()) == 1


def test_comparisons_are_numbered_and_found_by_name(store: Store):
    assert keep(store, ("single", "ddp"), 1) == "digits-1"
    assert keep(store, ("ddp",), 2, repeats=2) == "digits-2"
    assert [r.name for r in store.load("digits-1").runs] == ["single", "ddp"]
    assert {r.comparison for r in store.load("ddp").runs} == {"digits-2"}
    assert len(store.load("digits-2/ddp").runs) == 2
    assert [r.repeat for r in store.load("digits-2/ddp#2").runs] == [1]
    assert [r.comparison for r in store.load("digits-1/ddp", "single").runs] == ["digits-1"] * 2
    for number in (3, 4):  # hand-written loops; load finds the latest
        begun(store, number, "mine")
    assert [run.run_id for run in store.load("mine").runs] == ["r4"]
    assert [run.run_id for run in store.load("digits-3/mine").runs] == ["r3"]
    with pytest.raises(UserError, match=r"did you mean digits-\d"):
        store.load("digit-1")


def test_a_name_is_that_of_the_latest_and_earlier_ones_have_a_number(store: Store):
    for number in (3, 4, 5):
        begun(store, number, wanted_name="race")
    for name, run_id in (("race", "r5"), ("race-1", "r3"), ("race-2/ddp", "r4")):
        assert [run.run_id for run in store.load(name).runs] == [run_id]


def test_names_and_deleting(store: Store):
    for wrong, reason in (("ddp", "strategy"), ("a/b", "cannot be a name")):
        with pytest.raises(UserError, match=reason):
            store.begin_comparison(a_comparison(7), wanted_name=wrong)
    keep(store, ("single", "ddp"), 1)
    keep(store, ("ddp",), 2)
    assert len(store.delete("digits-1/ddp")) == 1
    assert [r.name for r in store.load("digits-1").runs] == ["single"]
    assert len(store.delete("digits-1")) == 1
    assert [r.comparison for r in store.list()] == ["digits-2"]
    run = begun(store, 4, "mine")
    store.flush()
    other = Store(store.folder)  # the store of another notebook
    with pytest.raises(UserError, match="is being trained"):
        other.delete("mine")
    store.finish(run.run_id, Status.FINISHED)
    assert other.delete("mine") == ("digits-1/mine#1",)


def test_closing_twice_is_no_harm_and_keeps_what_is_pending(tmp_path: Path):
    store = Store(tmp_path, flush_seconds=1000)
    store.append(batch(begun(store).run_id, [step(0, 1.0)]))
    for _ in range(2):
        store.close()
    assert Store(tmp_path).list()[0].num_events == 1
    with pytest.raises(StoreError, match="closed"):
        store.list()


def test_two_notebooks_write_at_once(tmp_path: Path):
    stores = [Store(tmp_path, flush_seconds=0.001) for _ in range(2)]

    def write_many(number: int) -> None:
        run = begun(stores[number], number)
        for sequence in range(40):
            stores[number].append(batch(run.run_id, [step(sequence, 1.0)], sequence=sequence))

    with ThreadPoolExecutor() as pool:
        list(pool.map(write_many, range(2)))
    for store in stores:
        store.flush()
    found = {run.comparison: run.num_events for run in stores[0].list()}
    assert found == {"digits-1": 40, "digits-2": 40}


def test_a_file_that_is_no_database_or_no_folder_is_refused_in_one_sentence(tmp_path: Path):
    Store(tmp_path / "other").close()
    with sqlite3.connect(tmp_path / "other" / FILE_NAME) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    (tmp_path / FILE_NAME).write_text("not a database at all" * 100)
    for folder, why in (
        ("other", "another version of ddpnb"),
        (".", "not a database"),
        (f"{FILE_NAME}/runs", "cannot be opened"),
    ):
        with pytest.raises(StoreError, match=why):
            Store(tmp_path / folder)


@pytest.mark.parametrize("trouble", ["deleted", "not a database any more", "none"])
def test_runs_go_on_in_a_temporary_folder_if_the_disk_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
):
    monkeypatch.setenv("HOME", str(tmp_path))
    store = Store(tmp_path / "runs")
    keep(store, ("ddp",))
    match trouble:
        case "deleted":
            shutil.rmtree(store.folder)
        case "not a database any more":
            (store.folder / FILE_NAME).write_bytes(b"no" * 4096)
    ended: list[Callable[[], object]] = []
    monkeypatch.setattr(
        atexit, "register", lambda f, *words: len(words) < 2 or ended.append(partial(f, *words))
    )
    found: list[str] = []
    words = {"name": "race", "task": "digits", "source": "", "specs": (), "notify": found.append}
    recorder = Recorder(store, **words)
    for run_id in ("r1", "r2"):
        recorder.begin(run_id, "async", spec("async"))
        steps = [step(i, 1.0) for i in range(9000)]
        recorder.add(batch(run_id, steps, header=header(spec("async"), 1)))
        recorder.end(run_id, Status.FINISHED)
    is_moved = trouble != "none"
    assert (store.folder != tmp_path / "runs") == is_moved == len(ended) == len(found)
    assert {run.status for run in store.load("race").runs} == {Status.FINISHED}
    assert ("digits-1" in {run.comparison for run in store.list()}) == ("any more" not in trouble)
    for end in ended:
        sentence = f"in {store.folder} until the kernel ends .*DDPNB_DATA"
        assert re.search(sentence, found[0])
        assert store.folder.stat().st_mode & 0o777 == 0o700
        end()
        assert not store.folder.exists()
    store.close()


@pytest.mark.parametrize("folder", ["/proc/data", "/sys/data", "/dev/null/data"])
def test_a_folder_that_only_looks_writable_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
):
    monkeypatch.setenv("HOME", folder)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("DDPNB_DATA", "")
    store, note = open_store(Path(folder).parent)
    assert "until the kernel ends" in note
    keep(store, ("ddp",))
    monkeypatch.setenv("DDPNB_DATA", folder)
    with pytest.raises(UserError, match=r"%env DDPNB_DATA=FOLDER\.$"):
        open_store()


def test_runs_lie_in_the_project_or_beside_the_notebook(tmp_path: Path):
    assert runs_folder(tmp_path) == tmp_path / "data" / "runs"
    (tmp_path / "data").mkdir()
    (tmp_path / "pyproject.toml").touch()
    inner = tmp_path / "notebooks" / "deep"
    inner.mkdir(parents=True)
    assert runs_folder(inner) == tmp_path / "data" / "runs"


@pytest.mark.parametrize("blocked", range(4))
@pytest.mark.parametrize("has_xdg", [False, True])
def test_runs_go_to_the_first_folder_that_can_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: int, has_xdg: bool
):
    here, home, xdg = (tmp_path / name for name in ("here", "home", "xdg"))
    users = xdg if has_xdg else home / ".local/share"
    for folder in (here, users, tmp_path / "tmp"):
        folder.mkdir(parents=True)
    if blocked & 1:
        (here / "data").touch()  # a file, so not even root can create here/data/runs
    if blocked & 2:
        (users / "ddpnb").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_DATA_HOME", str(xdg) if has_xdg else "relative")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("DDPNB_DATA", raising=False)
    store, note = open_store(here)
    if not blocked & 1:
        assert (store.folder, note) == (here / "data/runs", "")
    else:
        is_temporary = bool(blocked & 2)
        own = users / "ddpnb/runs" / here.relative_to("/")
        assert store.folder.parent in parent_folders() if is_temporary else store.folder == own
        assert str(store.folder) in note
        assert ("until the kernel ends" in note) == is_temporary
        assert note.count(". ") == 0
    keep(store, ("ddp",))
    store.close()


def test_a_variable_chooses_the_folder_and_bad_values_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    course = Store(runs_folder())
    keep(course, ("ddp",))
    for value, folder in (("a/b", "a/b"), (str(tmp_path / "c"), "c"), ("~/d", "home/d")):
        monkeypatch.setenv("DDPNB_DATA", value)
        store, note = open_store()
        assert (store.folder, note) == (tmp_path / folder, "")
        assert [run.comparison for run in store.list()] == ["digits-1"]  # copied from the project
        assert keep(store, ("ddp",), 2) == "digits-2"
        store.close()
        again, _ = open_store()
        assert len(again.list()) == 2
        again.close()
    assert len(course.list()) == 1
    course.close()
    for value in ("file", "file/below", "/dev/null/runs"):
        monkeypatch.setenv("DDPNB_DATA", value)
        with pytest.raises(UserError, match=r"^DDPNB_DATA is .* Set the environment variable"):
            open_store()


def test_what_is_no_longer_in_the_catalogue_is_still_listed_and_drawn(store: Store):
    store.finish(begun(store, name="Averaging:==").run_id, Status.FINISHED)
    gone = {"strategy": "Averaging:==", "task": "poetry", "slow": ["often"]}
    written = dataclasses.asdict(spec("ddp")) | gone
    with sqlite3.connect(store.folder / FILE_NAME) as connection:
        connection.execute("UPDATE runs SET spec = ?", (json.dumps(written),))
        connection.execute("UPDATE comparisons SET specs = ?", (json.dumps([written]),))
    connection.close()
    (listed,), comparison = store.list(), store.load("digits-1")
    kept = comparison.runs[0].spec
    assert (kept.batch_size, kept.task) == (spec("ddp").batch_size, "poetry")
    assert (kept.strategy, kept.slow) == ("Averaging:==", ("often",))
    result = ComparisonResult(comparison)
    assert listed.name in runs_table((listed,)).text()
    assert listed.name in result.table().text()
    assert result.plot().png().startswith(b"\x89PNG")
    assert "ddp_compare" in magic_of(comparison)
    assert listed.name in repr(Details(comparison))


RUNS = (
    stored("old/ddp", 1, status=Status.STOPPED),
    stored("race/single", 2),
    stored("race/ddp:hook=fp16", 2),
    stored("race/ddp:hook=fp16", 3, repeat=1),
    stored("New/async", 4, task="synthetic:samples=512"),
)


@pytest.mark.parametrize(
    ("text", "last", "found"),
    [
        ("/ddp", None, [0, 2, 3]),
        ("RACE", None, [1, 2, 3]),
        ("stopped", None, [0]),
        ("", 2, [2, 3, 4]),  # repeats count as one line
    ],
)
def test_only_what_is_asked_for_is_found(text: str, last: int | None, found: list[int]):
    assert matching(RUNS, text, last) == tuple(RUNS[index] for index in found)
    with pytest.raises(UserError, match="--last must be"):
        matching(RUNS, text, last=0)


def test_a_library_on_a_path_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(comparison, "LIBRARIES", ("torch", "a library of no index"))
    found = comparison.environment()
    assert found["torch"] > found["a library of no index"] == ""


def test_a_run_names_each_gpu_once_and_the_software_of_the_gpus():
    state = replace(make_state(0, 2), device_name="T4", gpu_software="CUDA 13.0, NCCL 2.28.9")
    places = [("a", "cuda:0"), ("a", "cuda:0"), ("a", "cuda:1"), ("b", "cuda:0")]
    states = [replace(state, host=host, device=device) for host, device in places]
    assert comparison.describe_ranks(states)["GPUs"] == "3 T4 (CUDA 13.0, NCCL 2.28.9)"
    assert comparison.describe_ranks([make_state(0, 2)])["GPUs"] == "none"

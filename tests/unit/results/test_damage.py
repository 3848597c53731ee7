"""A store from a stranger: any value may be in any column, but only the damaged run is lost."""

import json
import random
import sqlite3
from pathlib import Path

import pytest

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Mark, RunReport
from ddpnb.reports.listing import Details, runs_table
from ddpnb.reports.result import ComparisonResult
from ddpnb.results.query import matching
from ddpnb.results.recorder import Recorder, new_id
from ddpnb.results.run import Status
from ddpnb.results.store import FILE_NAME, Store, StoreError
from tests.unit.results.fake_runs import batch, header, spec, step

TABLES = ("comparisons", "runs", "batches", "reports")
ESCAPES = "\x1b[31mred\x1b[0m\r\n\x9bJ\u202e"
BAD = set("\x1b\r\x9b\u202e")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a store with two comparisons of two strategies: ``good`` and ``bad``."""
    store = Store(tmp_path / "runs")
    for name in ("good", "bad"):
        specs = [spec(strategy, comparison=name) for strategy in ("single", "ddp")]
        recorder = Recorder(store, name=name, task="digits", source="a\n\tb", specs=specs)
        for each in specs:
            run_id = new_id()
            recorder.begin(run_id, each.strategy, each)
            steps = [step(i, i + 1.0, 0.5) for i in range(20)]
            recorder.add(batch(run_id, steps, header=header(each, 20), metrics=[(2, "grad", 0.5)]))
            recorder.add(batch(run_id, [], sequence=1, marks=[Mark(rank=0, seconds=2.0)]))
            recorder.add_report(RunReport(run_id=run_id, rank=0, seconds=21.0, final_loss=0.4))
            recorder.end(run_id, Status.FINISHED)
    store.close()
    return store.folder


def change(folder: Path, *statement: object) -> None:
    """Change the file as a stranger can: without the rules of the tables."""
    connection = sqlite3.connect(folder / FILE_NAME)
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute("UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '')")
    connection.commit()
    connection.close()
    with sqlite3.connect(folder / FILE_NAME) as connection:
        connection.execute(*statement)
    connection.close()


def any_value(chance: random.Random) -> object:
    """Return a value of any type that SQLite can store."""
    return chance.choice(
        [
            lambda: None,
            lambda: chance.choice([0, -1, 7, 2**31, 2**63 - 1, -(2**63)]),
            lambda: chance.choice([0.5, -1.0, 1e308, float("inf"), 1e20]),
            lambda: chance.choice(["", "bogus", "null", "[]", "{}", "[[1]]", "1", "../x"]),
            lambda: ESCAPES + "".join(chr(chance.randrange(0x3000)) for _ in range(20)),
            lambda: '[["x", {}], 1, null, "' + "[" * chance.randrange(2000),
            lambda: "[" * 100_000,
            lambda: chance.randbytes(3),
            lambda: chance.randbytes(76 * chance.randrange(1, 30)),
            lambda: bytes(76 * chance.randrange(1, 30)),
            lambda: bytes(17_000_000),
        ]
    )()


def shown(store: Store, name: str, folder: Path) -> str:
    """Return all texts of a comparison: list, table, page, settings and exported numbers."""
    result = ComparisonResult(store.load(name))
    details = Details(result.comparison)
    for ending in ("csv", "runs.csv", "html"):
        result.save(folder / f"exported.{ending}")
    result.plot().png()
    texts = [result.text(), details.text(), result.table().html(), details.html("")]
    return "\n".join(texts)


@pytest.mark.parametrize("seed", [*range(16), 239])  # 239: a name of 100,000 characters
def test_a_damaged_value_hides_nothing_else_and_can_be_deleted(folder: Path, seed: int):
    chance = random.Random(seed)
    connection = sqlite3.connect(folder / FILE_NAME)
    table = chance.choice(TABLES)
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    rows = [row[0] for row in connection.execute(f"SELECT rowid FROM {table} ORDER BY rowid")]
    connection.close()
    column, row = chance.choice(columns), chance.choice(rows[len(rows) // 2 :])
    change(folder, f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (any_value(chance), row))
    store = Store(folder)
    runs = store.list()
    assert [run.name for run in runs if run.comparison == "good"] == ["single", "ddp"]
    assert len(runs) == 4
    assert all(len(run.address) < 3000 for run in runs)
    assert "good/ddp" in runs_table(matching(runs)).text()
    text = shown(store, "good", folder)
    for run in runs[2:]:
        text += shown(store, run.address, folder)
    assert not set(text) & BAD
    for run in runs[2:]:
        assert store.delete(run.address) == (run.address,)
    assert [run.comparison for run in store.list()] == ["good", "good"]
    store.close()


def test_a_store_without_a_column_is_refused_in_one_sentence(folder: Path):
    change(folder, "ALTER TABLE runs DROP COLUMN detail")
    store = Store(folder)
    with pytest.raises(StoreError, match="no such column"):
        store.list()
    store.close()


@pytest.mark.parametrize("path", ["{0}/victim", "../../../victim", "../victim", "victim"])
def test_deleting_removes_only_weights_whose_names_ddpnb_has_made(folder: Path, path: str):
    victims = [folder / "models/victim.pt", folder / "victim.pt", folder.parent / "victim.pt"]
    (folder / "models").mkdir()
    store = Store(folder)
    weights = [folder / f"models/{run.run_id}.pt" for run in store.list()]
    for file in (*victims, *weights):
        file.touch()
    change(folder, "UPDATE runs SET id = ? WHERE rowid = 3", (path.format(folder),))
    assert len(store.delete("bad")) == 2
    assert [file.exists() for file in weights] == [True, True, True, False]
    assert all(file.exists() for file in victims)
    store.close()


def test_a_file_name_with_a_null_character_is_refused(folder: Path):
    store = Store(folder)
    with pytest.raises(UserError, match="null character"):
        ComparisonResult(store.load("good")).save("a\0b.csv")
    store.close()


def test_texts_of_a_store_reach_the_screen_without_control_characters(folder: Path):
    for column in ("task", "detail"):
        table = "comparisons" if column == "task" else "runs"
        change(folder, f"UPDATE {table} SET {column} = ?", (ESCAPES,))
    for table, column in (("runs", "spec"), ("runs", "header"), ("comparisons", "environment")):
        for word in ("cpu", "digits", "torch"):
            new = json.dumps(word + ESCAPES)
            wanted = f"UPDATE {table} SET {column} = replace({column}, ?, ?)"
            change(folder, wanted, (json.dumps(word), new))
    store = Store(folder)
    text = runs_table(store.list()).text() + shown(store, "good", folder)
    assert "[31mred" in text
    assert not set(text) & BAD
    assert not any("[31mred" in line[:4] for line in text.splitlines())
    assert store.load("good").source == "a\n\tb"
    store.close()

"""ddpnb accepts the users' values, or rejects them in one sentence before anything starts."""

import inspect
import json
import random
import shlex
from collections.abc import Callable
from dataclasses import fields
from types import NoneType, SimpleNamespace

import numpy as np
import pytest

from ddpnb import api
from ddpnb.hosts.spec import HostsSpec
from ddpnb.magics.arguments import arguments, flags, with_expression
from ddpnb.magics.magics import DdpMagics
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.inspection import InspectSpec
from ddpnb.protocol.notation import format_ranks, parse_ranks
from ddpnb.protocol.options import Option
from ddpnb.protocol.trace import CollectiveSpec
from ddpnb.results.decoding import encoded
from ddpnb.session.comparison_spec import ComparisonSpec

WRONG = [
    (["repeats", "1.5"], lambda: api.compare("ddp", repeats=1.5)),
    (["strategies", "'Callable'"], lambda: api.compare(Callable, task="digits")),
    (["--slow", "1"], lambda: api.compare("ddp", slow=[1])),
    (["slow", "3"], lambda: api.compare("ddp", slow=3)),
    (["save", "True or False", "1"], lambda: api.compare("ddp", save=1)),
    (["lr", "greater than 0"], lambda: api.compare("ddp", lr=0)),
    (["target", "an object"], lambda: api.compare("ddp", target=object())),
    (["wait takes", "3"], lambda: api.run_cell("1", wait=3)),
    (["n ", "True"], lambda: api.start(True)),
    (["arguments", "a list"], lambda: api.run_script("train.py", "--epochs 3")),
    (["--ranks", "two"], lambda: api.predict([1, "two"])),
    (["epochs", "too large"], lambda: api.compare("ddp", epochs=10**400)),
    (["'learning_rate'", " lr?"], lambda: api.compare("ddp", learning_rate=0.1)),
    (["stop", "positional"], lambda: api.stop(1)),
    (["pull", "'expression'"], lambda: api.pull()),
    (["start", "'n'"], lambda: api.start(2, n=3)),
    (["did you mean all_reduce"], lambda: CollectiveSpec(name="all_redduce", ranks=(0, 1))),
    (["Remove --op"], lambda: CollectiveSpec(name="broadcast", ranks=(0, 1), op="max")),
    (["--root 7"], lambda: CollectiveSpec(name="reduce", ranks=(0, 1), root=7)),
    (["at most 256,000,"], lambda: CollectiveSpec(name="gather", ranks=(0,), num_bytes=4 * 10**9)),
    (["Inspect either net or a task"], lambda: api.inspect("net", task="digits")),
    (["--batch-size"], lambda: api.inspect("net", batch_size=8)),
    (["--batch-size", "0"], lambda: api.inspect(task="digits", batch_size=0)),
    (["--batch needs a model"], lambda: InspectSpec(batch="x")),
    (["'abc' does not name ranks. Write numbers and ranges,"], lambda: parse_ranks("abc", 4)),
    (["does not name ranks"], lambda: parse_ranks("-1", 4)),
    (["does not name ranks"], lambda: parse_ranks("1.5", 4)),
    (["'3-1' is an empty range. Write the smaller number first"], lambda: parse_ranks("3-1", 4)),
    (["There is no rank 4. The ranks are 0-3."], lambda: parse_ranks("4", 4)),
    (["There is no rank 4-5. The ranks are 0-3."], lambda: parse_ranks("0,2-5", 4)),
    (["There is no rank 4-"], lambda: parse_ranks("0-99999999999", 4)),
    (["'tpu'", "auto, cpu, cuda"], lambda: api.start(device="tpu")),
    (["auto, gloo, nccl"], lambda: HostsSpec(backend="mpi")),
    (["-n"], lambda: HostsSpec(num_ranks=0)),
    (["256"], lambda: HostsSpec(num_ranks=257)),
    (["--threads"], lambda: HostsSpec(num_threads=0)),
    (["--backend gloo"], lambda: HostsSpec(device="cpu", backend="nccl")),
    (["V100, A100, T4"], lambda: HostsSpec(devices="8xH900")),
    (["Remove -n 4"], lambda: HostsSpec(devices="8", num_ranks=4)),
    (["on CPUs"], lambda: HostsSpec(devices="8", device="cuda")),
    (["on this host only"], lambda: HostsSpec(devices="8", hosts="a:4,b:4")),
    (["--devices"], lambda: HostsSpec(as_="resnet50")),
    (["each host once"], lambda: HostsSpec(hosts="a:1,a:1")),
    (["not valid in --hosts. Write a:4,b:4"], lambda: HostsSpec(hosts="-oProxyCommand=x:1")),
    (["Remove -n"], lambda: HostsSpec(hosts="a:1", num_ranks=2)),
    (["need a launcher. Add --engines"], lambda: HostsSpec(hosts="a", ranks_per_host=2)),
    (["need a launcher. Add --engines"], lambda: HostsSpec(hosts="a:1", timeout=1.0)),
    (["Remove -n, --engines"], lambda: HostsSpec(hosts="a:2", engines="slurm")),
    (["Add --hosts"], lambda: HostsSpec(interface="net0")),
    (["slurm, mpi, pbs, lsf, sge, htcondor, local"], lambda: HostsSpec(engines="nothing")),
    (["greater than 0, not 0"], lambda: HostsSpec(engines="mpi", timeout=0.0, num_ranks=2)),
    (["need -n"], lambda: HostsSpec(profile="site")),
    (["does not divide -n 3"], lambda: HostsSpec(engines="slurm", num_ranks=3, ranks_per_host=2)),
]
"""Words that the error must contain, and a call that raises the error."""


@pytest.mark.parametrize(("named", "call"), WRONG)
def test_what_cannot_be_is_refused_in_one_sentence(named: list[str], call: Callable[[], object]):
    with pytest.raises(UserError) as raised:
        call()
    assert all(word in str(raised.value) for word in named)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, (0, 1, 2, 3)),
        ("all", (0, 1, 2, 3)),
        ("  ", (0, 1, 2, 3)),
        ("2", (2,)),
        ("0,2-3", (0, 2, 3)),
        (" 3 , 0 - 1 ", (0, 1, 3)),
        ("1,1,0-1", (0, 1)),
    ],
)
def test_sets_of_ranks_are_read(text: str | None, expected: tuple[int, ...]):
    assert parse_ranks(text, 4) == expected


def test_sets_of_ranks_are_written_the_short_way():
    for text in ("0", "0-1", "0,2-4", "1,3,5"):
        assert format_ranks(reversed(parse_ranks(text, 6))) == text
    assert format_ranks(()) == ""


def test_numbers_of_numpy_are_stored_as_any_others(monkeypatch: pytest.MonkeyPatch):
    asked: list[ComparisonSpec] = []
    monkeypatch.setattr(api, "this_session", lambda: SimpleNamespace(compare=asked.append))
    given = {"batch_size": np.int64(8), "lr": np.float32(0.5), "epochs": np.int16(3)}
    api.compare(np.str_("ddp"), task="digits", log=np.True_, kill=[np.str_("1@5s")], **given)
    stored = json.loads(encoded(asked[0].run_specs()[-1]))
    expected = {"strategy": "ddp", "batch_size": 8, "learning_rate": 0.5, "num_epochs": 3.0}
    assert stored | expected | {"kill": ["1@5s"]} == stored
    assert asked[0].options.log is True
    values = [getattr(asked[0].training, entry.name) for entry in fields(asked[0].training)]
    assert {type(value) for value in values} <= {int, float, str, bool, tuple, NoneType}


def test_all_twins_are_checked():
    twins: list[Callable[..., object]] = [
        function
        for name, function in inspect.getmembers(api, inspect.isfunction)
        if function.__module__ == api.__name__ and not name.startswith("_")
    ]
    assert len(twins) > 20
    for twin in twins:
        assert hasattr(twin, "__wrapped__"), twin


@pytest.mark.parametrize(
    ("magic", "twin"),
    [
        (DdpMagics.ddp_start, api.start),
        (DdpMagics.ddp, api.run_cell),
        (DdpMagics.ddp_run, api.run_script),
        (DdpMagics.ddp_compare, api.compare),
        (DdpMagics.ddp_plot, api.plot),
        (DdpMagics.ddp_samples, api.samples),
        (DdpMagics.ddp_inspect, api.inspect),
        (DdpMagics.ddp_predict, api.predict),
    ],
)
def test_a_magic_and_its_twin_take_the_same_options(magic, twin: Callable[..., object]):
    keywords = {Option(default=None, about="", flag=flag).keyword for flag in flags(magic)}
    own = {"n", "m", "i"}  # short flags
    assert keywords - own <= inspect.signature(twin).parameters.keys()


LETTERS = "ab\"'\\ \t#,=é$-"


@pytest.mark.parametrize("seed", range(20))
def test_a_line_is_split_as_in_a_shell(seed: int):
    draw = random.Random(seed)
    name, *words = ["".join(draw.choices(LETTERS, k=draw.randint(0, 6))) for _ in range(4)]
    typed = f"{shlex.join(['x', *words])} --save={shlex.quote(name)}"
    assert arguments(DdpMagics.ddp_run, typed).arguments == [*words, f"--save={name}"]
    assert arguments(DdpMagics.ddp_show, f"trace --save={shlex.quote(name)}").save == name
    assert arguments(DdpMagics.ddp_plot, f"-- {shlex.join(words)}").names == words


@pytest.mark.parametrize(
    ("magic", "line", "expected"),
    [
        (DdpMagics.ddp_export, r"race a\ b.py", {"path": "a b.py"}),
        (DdpMagics.ddp_export, "race 'a b'/c#1.csv", {"path": "a b/c#1.csv"}),
        (
            DdpMagics.ddp_compare,
            "\"ddp\" --lr '0.1,0.2'",
            {"strategies": ["ddp"], "lr": ["0.1,0.2"]},
        ),
        (DdpMagics.rank, '"0,2-3"', {"ranks": ["0,2-3"]}),
        (DdpMagics.ddp_exercise, "'3.2'", {"number": "3.2"}),
        (DdpMagics.ddp_check, 'd["a b"] \'f(1, 2)\' "x"', {"names": ['d["a b"]', "f(1, 2)", "x"]}),
        (DdpMagics.ddp_samples, "d['a'] -n '2'", {"name": "d['a']", "n": "2"}),
        (
            DdpMagics.ddp_inspect,
            """n["a"] --batch d["x"] --loss='f(output, d["y"])' --run="a b\"""",
            {"model": 'n["a"]', "batch": 'd["x"]', "loss": 'f(output, d["y"])', "run": "a b"},
        ),
    ],
)
def test_quotation_marks_stay_only_inside_expressions(magic, line: str, expected: dict):
    takes_python = magic.__name__ in ("ddp_check", "ddp_samples", "ddp_inspect")
    found = vars(arguments(magic, line, python=takes_python))
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    "expression",
    ["x", "-x", 'd["a  b"]', '"text"', "f'{a}'  +  \"it's\"", '"a --ranks 1 b"', '""', "x  # y"],
)
def test_what_is_pulled_is_taken_as_typed(expression: str):
    for line in (f"{expression} --as 'y'  --ranks=0,1", f" --ranks 0,1 {expression} --as y"):
        found = vars(arguments(DdpMagics.ddp_pull, with_expression(line)))
        assert found == {"expression": expression, "ranks": "0,1", "name": "y"}


@pytest.mark.parametrize("line", ['race "a b.py', "race it's.csv", "race a\\"])
@pytest.mark.parametrize("python", [False, True])
def test_an_unclosed_quotation_mark_is_one_sentence(line: str, python: bool):
    if python and line.endswith("\\"):
        return
    with pytest.raises(UserError, match=r"^No .* in %ddp_export race .*\. Close each"):
        arguments(DdpMagics.ddp_export, line, python=python)

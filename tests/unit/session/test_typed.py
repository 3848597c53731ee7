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

from ddpnb import api, declaration
from ddpnb.hosts.spec import HostsSpec
from ddpnb.magics import magics
from ddpnb.magics.arguments import arguments, flags, function_of
from ddpnb.magics.magics import MAGICS
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.inspection import InspectSpec, SamplerSpec
from ddpnb.protocol.notation import format_ranks, parse_ranks
from ddpnb.protocol.options import options_of
from ddpnb.protocol.trace import CollectiveSpec
from ddpnb.results.decoding import encoded
from ddpnb.session.comparison_spec import ComparisonSpec

WRONG = [
    (["repeats", "1.5"], lambda: api.compare("ddp", task="digits", repeats=1.5)),
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
    (["--lr", "0.1 twice"], lambda: api.compare("ddp", task="digits", lr="0.1,0.2,0.10")),
    (["--lr", "0, not -0.5."], lambda: api.compare("ddp", task="digits", lr=[0.1, -0.5])),
    (["--jitter", "at most 100, not 200."], lambda: api.compare("ddp", jitter="20000%")),
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


def test_all_public_functions_check_their_arguments():
    public: list[Callable[..., object]] = [
        function
        for name, function in inspect.getmembers(api, inspect.isfunction)
        if function.__module__ == api.__name__ and not name.startswith("_")
    ]
    assert len(public) > 20
    for each in public:
        assert hasattr(each, "__wrapped__"), each


ADDED = {"ddp_pull": {"as_"}, "ddp_runs": {"show", "delete"}}
"""The arguments that only the magic has."""
NAMES = {"ddp": "run_cell", "ddp_run": "run_script", "ddp_show": "show_collective"}


@pytest.mark.parametrize("name", MAGICS)
def test_a_magic_has_the_arguments_and_the_help_of_its_function(name: str):
    declared = MAGICS[name]
    usual = NAMES.get(name, name.removeprefix("ddp_"))
    function = getattr(api, usual, declared.function)
    shared = declared.arguments.keys() - ADDED.get(name, set())
    assert shared <= inspect.signature(function).parameters.keys()
    described = inspect.getdoc(function)
    assert all(f" {key}: " in described or f"*{key}: " in described for key in shared)
    called = function_of(declared)
    assert inspect.getsourcefile(inspect.unwrap(called)) in (
        api.__file__,
        magics.__file__,
    )  # for %magic??
    shown = "".join(called.__doc__.split())  # argparse breaks words at hyphens
    assert "".join(described.split("\n")[0].split()) in shown
    for each in declared.arguments.values():
        assert each.flag in shown
        assert "".join(each.about.split()) in shown


def test_a_signature_declares_a_magic():
    seen = []

    @declaration.magic("ddp_try", options_of(SamplerSpec, "num_samples"), keep="-k")
    def tried(
        *words: str, source: str = "", last: int = 1, keep: bool = False, **choices: object
    ) -> None:
        """Try it: ``%ddp_try a``.

        Args:
            *words: some
                words.
            source: the cell.
            last: a number.
            keep: a switch.
            **choices: as listed.
        """
        seen.append((words, source, last, keep, choices))

    declared = MAGICS.pop("ddp_try")
    assert declared.kind == "line_cell"
    assert declared.help == "Try it: ``%ddp_try a``."
    assert flags(declared) == ["--last", "-k", "-n"]
    assert declared.arguments["words"].about == "some words"
    MAGICS["ddp_try"] = declared
    try:
        call = function_of(declared)
        call("a 'b c' -k -n 3 --last 2", "x")
        call("")
        with pytest.raises(UserError, match=r"--last takes a whole number, not 'x'\."):
            call("--last x")
        with pytest.raises(UserError, match=r"expected one .* Write for example %ddp_try a\. Type"):
            call("--last")
        with pytest.raises(UserError, match="ddp_try has no option --lasst; did you mean --last"):
            call("--lasst 2")
    finally:
        del MAGICS["ddp_try"]
    cell = "# %%ddp_try a 'b c' -k -n 3 --last 2\nx"
    assert seen == [(("a", "b c"), cell, 2, True, {"n": "3"}), ((), "", 1, False, {})]


LETTERS = "ab\"'\\ \t#,=é$-"


@pytest.mark.parametrize("seed", range(20))
def test_a_line_is_split_as_in_a_shell(seed: int):
    draw = random.Random(seed)
    name, *words = ["".join(draw.choices(LETTERS, k=draw.randint(0, 6))) for _ in range(4)]
    typed = f"{shlex.join(['x', *words])} --save={shlex.quote(name)}"
    assert arguments("ddp_run", typed)[1]["arguments"] == [*words, f"--save={name}"]
    assert arguments("ddp_show", f"trace --save={shlex.quote(name)}")[1]["save"] == name
    assert arguments("ddp_plot", f"-- {shlex.join(words)}")[0] == words


@pytest.mark.parametrize(
    ("magic", "line", "several", "expected"),
    [
        ("ddp_export", r"race a\ b.py", [], {"name": "race", "path": "a b.py"}),
        ("ddp_export", "race 'a b'/c#1.csv", [], {"name": "race", "path": "a b/c#1.csv"}),
        ("ddp_compare", "\"ddp\" --lr '0.1,0.2'", ["ddp"], {"source": "", "lr": ["0.1,0.2"]}),
        ("rank", '"0,2-3"', ["0,2-3"], {"source": ""}),
        ("ddp_exercise", "'3.2'", [], {"number": "3.2"}),
        ("ddp_check", 'd["a b"] \'f(1, 2)\' "x"', ['d["a b"]', "f(1, 2)", "x"], {}),
        ("ddp_samples", "d['a'] -n '2'", [], {"name": "d['a']", "n": "2"}),
        (
            "ddp_inspect",
            """n["a"] --batch d["x"] --loss='f(output, d["y"])' --run="a b\"""",
            [],
            {
                "model": 'n["a"]',
                "batch": 'd["x"]',
                "loss": 'f(output, d["y"])',
                "run": "a b",
                "source": "",
            },
        ),
    ],
)
def test_quotation_marks_stay_only_inside_expressions(
    magic: str, line: str, several: list[str], expected: dict
):
    assert arguments(magic, line) == (several, expected)


@pytest.mark.parametrize(
    "expression",
    ["x", "-x", 'd["a  b"]', '"text"', "f'{a}'  +  \"it's\"", '"a --ranks 1 b"', '""', "x  # y"],
)
def test_what_is_pulled_is_taken_as_typed(expression: str):
    for line in (f"{expression} --as 'y'  --ranks=0,1", f" --ranks 0,1 {expression} --as y"):
        found = arguments("ddp_pull", line)
        assert found == ([], {"expression": expression, "ranks": "0,1", "as_": "y"})


@pytest.mark.parametrize("line", ['race "a b.py', "race it's.csv", "race a\\"])
@pytest.mark.parametrize("magic", ["ddp_export", "ddp_check"])  # ddp_check takes Python
def test_an_unclosed_quotation_mark_is_one_sentence(line: str, magic: str):
    if magic == "ddp_check" and line.endswith("\\"):
        return
    with pytest.raises(UserError, match=rf"^No .* in %{magic} race .*\. Close each"):
        arguments(magic, line)

"""The twins in Python refuse what cannot be in a sentence, before anything is begun."""

import inspect
import json
from collections.abc import Callable
from dataclasses import fields
from types import NoneType

import numpy as np
import pytest

from ddpnb import api, inside
from ddpnb.history.store import to_text
from ddpnb.protocol.errors import UserError
from ddpnb.session.comparison_spec import ComparisonSpec

WRONG = [
    (["epochs", "'two'"], lambda: api.compare("ddp", task="digits", epochs="two")),
    (["repeats", "1.5"], lambda: api.compare("ddp", repeats=1.5)),
    (["strategies", "'Callable'"], lambda: api.compare(Callable, task="digits")),
    (["strategies", "a list"], lambda: api.compare(["ddp"], task="digits")),
    (["each of slow", "1"], lambda: api.compare("ddp", slow=[1])),
    (["clip", "'one'"], lambda: api.compare("ddp", clip="one")),
    (["slow", "3"], lambda: api.compare("ddp", slow=3)),
    (["save", "True or False", "1"], lambda: api.compare("ddp", save=1)),
    (["save", "on or off", "'yes'"], lambda: api.compare("ddp", save="yes")),
    (["wait", "3"], lambda: api.run_cell("1", wait=3)),
    (["lr", "greater than 0"], lambda: api.compare("ddp", lr=0)),
    (["target", "an object"], lambda: api.compare("ddp", target=object())),
    (["n ", "True"], lambda: api.start(True)),
    (["source", "None"], lambda: api.run_cell(None)),
    (["arguments", "a list"], lambda: api.run_script("train.py", "--epochs 3")),
    (["ranks", "3"], lambda: api.push(3, a=1)),
    (["--ranks", "1,two"], lambda: inside.predict([1, "two"])),
    (["epochs", "too large"], lambda: api.compare("ddp", epochs=10**400)),
    (["'epoch'", "epochs"], lambda: api.compare("ddp", epoch=3)),
    (["'learning_rate'", " lr?"], lambda: api.compare("ddp", learning_rate=0.1)),
    (["restart", "'lucky'"], lambda: api.restart(lucky=1)),
    (["stop", "positional"], lambda: api.stop(1)),
    (["pull", "'expression'"], lambda: api.pull()),
    (["start", "'n'"], lambda: api.start(2, n=3)),
    (["'threads'", "fork, spawn"], lambda: api.start(method="threads")),
]
"""What the one sentence names, and the call."""


@pytest.mark.parametrize(("named", "call"), WRONG)
def test_what_is_of_another_type_is_refused_in_a_sentence(
    named: list[str], call: Callable[[], object]
):
    with pytest.raises(UserError) as raised:
        call()
    assert all(word in str(raised.value) for word in named)
    assert "\n" not in str(raised.value)


def test_numbers_of_numpy_are_stored_as_any_others():
    asked = compared(
        np.str_("ddp"),
        batch_size=np.int64(8),
        lr=np.float32(0.5),
        epochs=np.int16(3),
        clip=np.float64(1),
        log=np.True_,
        kill=[np.str_("1@5s")],
    )
    stored = json.loads(to_text(asked.run_specs()[-1]))
    assert [stored[name] for name in ("strategy", "batch_size", "learning_rate", "clip")] == [
        "ddp",
        8,
        0.5,
        1.0,
    ]
    assert (stored["num_epochs"], stored["kill"], asked.options.log) == (3.0, ["1@5s"], True)
    values = [getattr(asked.training, entry.name) for entry in fields(asked.training)]
    assert {type(value) for value in values} <= {int, float, str, bool, tuple, NoneType}


def compared(*strategies: str, **choices: object) -> ComparisonSpec:
    """Return the comparison that ``compare`` would ask its session for."""
    asked: list[ComparisonSpec] = []

    class Asked:
        def compare(self, spec: ComparisonSpec, *, wait: bool) -> None:
            asked.append(spec)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "this_session", Asked)
        api.compare(*strategies, task="digits", **choices)
    return asked[0]


def test_all_twins_are_checked():
    twins: list[Callable[..., object]] = [
        function
        for module in (api, inside)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    ]
    assert len(twins) > 20
    for twin in twins:
        assert hasattr(twin, "__wrapped__"), twin

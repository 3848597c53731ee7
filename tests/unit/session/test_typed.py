"""The twins in Python refuse what cannot be in a sentence, before anything is begun."""

import inspect
import json
from collections.abc import Callable
from dataclasses import fields
from types import NoneType

import numpy as np
import pytest

from ddpnb import api, inside
from ddpnb.history.database import to_text
from ddpnb.protocol.errors import UserError
from ddpnb.session.comparison_spec import ComparisonSpec

WRONG = {
    "epochs takes a number, not 'two'.": lambda: api.compare("ddp", task="digits", epochs="two"),
    "repeats takes a whole number, not 1.5.": lambda: api.compare("ddp", repeats=1.5),
    "each of strategies takes a text, not a class: write its name, 'Callable'.": (
        lambda: api.compare(Callable, task="digits")
    ),
    "each of strategies takes a text, not a list.": lambda: api.compare(["ddp"], task="digits"),
    "each of slow takes a text, not 1.": lambda: api.compare("ddp", slow=[1]),
    "clip takes a number, not 'one'.": lambda: api.compare("ddp", clip="one"),
    "slow takes a text or a list of texts, not 3.": lambda: api.compare("ddp", slow=3),
    "save takes True or False, not 1.": lambda: api.compare("ddp", save=1),
    "save takes on or off, not 'yes'.": lambda: api.compare("ddp", save="yes"),
    "wait takes True or False, not 3.": lambda: api.run_cell("1", wait=3),
    "lr must be greater than 0, not 0.": lambda: api.compare("ddp", lr=0),
    "target takes a number, not an object.": lambda: api.compare("ddp", target=object()),
    "n takes a whole number, not True.": lambda: api.start(True),
    "hosts takes a text, not 3.": lambda: api.start(hosts=3),
    "source takes a text, not None.": lambda: api.run_cell(None),
    "arguments takes a list of texts, such as ['--epochs', '3'].": (
        lambda: api.run_script("train.py", "--epochs 3")
    ),
    "ranks takes a text, not 3.": lambda: api.push(3, a=1),
    "Write --ranks as 1,2,4,8, not 1,two.": lambda: inside.predict([1, "two"]),
    "path takes a text, not 3.": lambda: api.export("race", 3),
    "epochs is too large a number.": lambda: api.compare("ddp", epochs=10**400),
    "compare: got an unexpected keyword argument 'epoch'; did you mean epochs?": lambda: (
        api.compare("ddp", epoch=3)
    ),
    "compare: got an unexpected keyword argument 'learning_rate'; did you mean lr?": lambda: (
        api.compare("ddp", learning_rate=0.1)
    ),
    "compare: got an unexpected keyword argument 'strategies'; ddpnb.compare? explains it.": (
        lambda: api.compare(strategies=("ddp",))
    ),
    "restart: got an unexpected keyword argument 'lucky'; ddpnb.restart? explains it.": lambda: (
        api.restart(lucky=1)
    ),
    "stop: got an unexpected keyword argument 'now'; ddpnb.stop? explains it.": lambda: api.stop(
        now=True
    ),
    "stop: too many positional arguments; ddpnb.stop? explains it.": lambda: api.stop(1),
    "pull: missing a required argument: 'expression'; ddpnb.pull? explains it.": lambda: api.pull(),
    "start: multiple values for argument 'n'; ddpnb.start? explains it.": lambda: api.start(2, n=3),
    "There is no method 'threads'; choose one of: fork, spawn.": (
        lambda: api.start(method="threads")
    ),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_what_is_of_another_type_is_refused_in_a_sentence(sentence: str):
    with pytest.raises(UserError) as raised:
        WRONG[sentence]()
    assert str(raised.value) == sentence


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

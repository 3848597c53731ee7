"""Tab offers the right completions after the words of a magic's line."""

import pytest

from ddpnb.magics.arguments import flags
from ddpnb.magics.completion import following
from ddpnb.magics.magics import MAGICS
from ddpnb.protocol.notation import LINKS

OFFERED = {
    "%ddp_start --": ["--device", "--backend", "--threads"],
    "%ddp_start --device ": ["auto", "cpu", "cuda"],
    "%ddp_start --engines ": ["slurm", "mpi", "pbs", "lsf", "sge", "htcondor", "local"],
    "%ddp_start --profile de": ["default"],
    "%%ddp --n": ["--no-wait", "--name"],
    "%%ddp_compare dp a": ["async"],
    "%ddp_compare ddp --task s": ["synthetic"],
    "%ddp_compare async:mo": ["async:momentum="],
    "%ddp_compare ddp --link ": list(LINKS),
    "%ddp_compare ddp --devices 8xA": ["8xA100"],
    "%ddp_compare ddp --task synthetic:": ["synthetic:samples=", "synthetic:compute="],
    "%ddp_compare ddp --task synthetic:compute=1,p": ["synthetic:compute=1,parameters="],
    "%ddp_inspect --loss f --": ["--batch", "--bucket-cap"],
    "%ddp_source ddp-b": ["ddp-by-hand"],
    "%ddp_plot small --panels ": ["all"],
    "%ddp_push he": ["here"],
    "%time he": [],
    "%ddp_run 'my script.py' --": [],
}


def after(line: str) -> dict[str, str]:
    """Return the completions of a line, in order, with the kind of each completion."""
    *words, last = line.split(" ")
    found = following(words, {"here": 1}, last)
    return {text: kind for text, kind in found if text.startswith(last)}


@pytest.mark.parametrize("name", MAGICS)
def test_all_options_of_a_magic_are_offered(name: str):
    found = after(f"%{name} --")
    assert list(found) == [flag for flag in flags(MAGICS[name]) if flag.startswith("--")]


@pytest.mark.parametrize("line", OFFERED)
def test_what_may_follow_is_offered(line: str):
    assert set(OFFERED[line]) <= set(after(line))
    assert bool(OFFERED[line]) == bool(after(line))


def test_names_come_before_options_and_each_has_its_kind():
    kinds = after("%ddp_compare ")
    assert list(kinds)[:3] == ["single", "dp", "ddp"]
    assert list(dict.fromkeys(kinds.values())) == ["strategy", "option"]
    assert set(after("%ddp_compare ddp --task ").values()) == {"task"}

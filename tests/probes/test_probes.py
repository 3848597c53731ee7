"""A private part that has gone switches its own feature off, and no other."""

from typing import Any

import pytest

from ddpnb.compat import cloudpickle_internals, ipyparallel_internals, torch_internals
from ddpnb.compat.probe import Probe
from tests.probes.breaks import BREAKS, missing_features, missing_features_without
from tests.probes.collectives import missing_features_without_gather
from tests.rank.ranks import CONTEXT, TIMEOUT_SECONDS

MODULES = (torch_internals, ipyparallel_internals, cloudpickle_internals)
PROBES = {
    name: (module, value)
    for module in MODULES
    for name, value in vars(module).items()
    if isinstance(value, Probe)
}


def in_a_process(job: Any, *args: Any) -> Any:
    """Return what a job returns in a process of its own, where no probe has run yet."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=job, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(TIMEOUT_SECONDS), "hangs"
    result = ours.recv()
    process.join()
    return result


def test_there_is_a_way_to_break_each_probe():
    assert BREAKS.keys() == PROBES.keys()


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_off_with_the_versions_installed(module: Any):
    assert in_a_process(missing_features, module.__name__) == ()


@pytest.mark.parametrize("name", BREAKS)
def test_one_feature_is_off_and_says_so(name: str):
    module, probe = PROBES[name]
    assert in_a_process(missing_features_without, module.__name__, name) == (probe.sentence,)


def test_a_sentence_names_the_version():
    assert torch_internals.lists_step_hooks.sentence.startswith("torch 2.")


def test_collectives_of_another_form_are_named_and_the_rest_are_compared():
    usual, (missing,), is_on = in_a_process(missing_features_without_gather)
    assert usual == ()
    assert missing.endswith(": gather, reduce not compared before gloo; `--check` still does it")
    assert is_on

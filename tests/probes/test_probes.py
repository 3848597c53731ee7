"""A private part that has gone switches its own feature off, and no other."""

import importlib
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest

from ddpnb.compat import cloudpickle_internals, ipyparallel_internals, torch_internals
from ddpnb.compat.probe import Probe
from ddpnb.rank.collectives import mismatch
from ddpnb.rank.collectives.table import METHODS
from tests.rank.ranks import TIMEOUT_SECONDS, begin

MODULES = (torch_internals, ipyparallel_internals, cloudpickle_internals)
PROBES = {
    name: (module, value)
    for module in MODULES
    for name, value in vars(module).items()
    if isinstance(value, Probe)
}
LOOKED_AT = {
    "intercepts_collectives": "torch.distributed:ProcessGroup.unbox",
    "skips_frames": "torch:_C._dynamo.eval_frame.set_code_exec_strategy",
    "records_collectives": "torch:_C._distributed_c10d._dump_fr_trace_json",
    "counts_collectives": "torch.distributed:ProcessGroup._get_sequence_number_for_group",
    "lists_groups": "torch.distributed.distributed_c10d:_World.pg_names",
    "hides_group": "torch.distributed.distributed_c10d:_WorldMeta.WORLD",
    "ends_data_workers": "torch.utils.data.dataloader:"
    "_MultiProcessingDataLoaderIter._shutdown_workers",
    "lists_step_hooks": "torch.optim:Optimizer.register_step_pre_hook",
    "follows_calls": "ipyparallel:Client.send_apply_request",
    "replaces_heartbeats": "ipyparallel.controller.heartmonitor:HeartMonitor.start",
    "shares_globals": "cloudpickle:Pickler.globals_ref",
    "knows_classes": "cloudpickle.cloudpickle:_class_setstate",
}
"""For each probe, by its name: a part that it looks at."""


def missing_features(module: str, gone: str, pipe: Connection) -> None:
    """Send what a module of ``compat`` says where a part is gone, as the first thing it says."""
    compat = importlib.import_module(module)
    if gone:
        name, _, path = gone.partition(":")
        *owners, attribute = path.split(".")
        owner: Any = importlib.import_module(name)
        for each in owners:
            owner = getattr(owner, each)
        part = vars(owner).get(attribute)
        if isinstance(part, property) and part.fset:  # as set by ddpnb alone
            setattr(owner, attribute, property(part.fget))
        elif part is not None:
            delattr(owner, attribute)
        else:  # its instances may not have it either
            setattr(owner, attribute, property())
    on_gpus = {"can_abort": True} if module.endswith("torch_internals") else {}
    pipe.send(compat.missing_features(**on_gpus))


def missing_features_without_gather(pipe: Connection) -> None:
    """Send the same of collectives that have another form."""
    METHODS["gather"] = replace(METHODS["gather"], operation="gather_of_another_version_")
    METHODS["reduce"] = replace(METHODS["reduce"], root=0)
    pipe.send((mismatch.missing_features(), torch_internals.intercepts_collectives.works))


def in_a_process(job: Any, *args: Any) -> Any:
    """Return what a job sends in a process of its own, where no probe has run yet."""
    process, pipe = begin(job, *args)
    assert pipe.poll(TIMEOUT_SECONDS), "hangs"
    result = pipe.recv()
    process.join()
    return result


def test_there_is_a_way_to_break_each_probe():
    assert LOOKED_AT.keys() == PROBES.keys()


def test_nothing_is_off_with_the_versions_installed():
    for module in MODULES:
        assert in_a_process(missing_features, module.__name__, "") == ()
    assert mismatch.missing_features() == ()


@pytest.mark.parametrize("name", LOOKED_AT)
def test_one_feature_is_off_and_says_so(name: str):
    module, probe = PROBES[name]
    gone = LOOKED_AT[name]
    assert in_a_process(missing_features, module.__name__, gone) == (probe.sentence,)


def test_collectives_of_another_form_are_named_and_the_rest_are_compared():
    (missing,), is_on = in_a_process(missing_features_without_gather)
    assert missing.endswith(": gather, reduce not compared before gloo; `--check` still does it")
    assert is_on

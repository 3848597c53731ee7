"""If a private part of a library is missing, ddpnb switches off only the feature that needs it."""

import importlib
import pkgutil
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import IPython
import pytest

from ddpnb import compat
from ddpnb.compat import probe, torch_internals
from ddpnb.rank.collectives import mismatch
from ddpnb.rank.collectives.table import METHODS
from tests.rank.ranks import TIMEOUT_SECONDS, begin

PROBES = {
    name: value
    for module in pkgutil.iter_modules(compat.__path__)
    for name, value in vars(importlib.import_module(f"ddpnb.compat.{module.name}")).items()
    if isinstance(value, probe.Probe)
}
LOOKED_AT = {
    "intercepts_collectives": "torch.distributed:ProcessGroup.unbox",
    "runs_backward_in_one_function": "torch.autograd:_engine_run_backward",
    "skips_frames": "torch:_C._dynamo.eval_frame.set_code_exec_strategy",
    "records_collectives": "torch:_C._distributed_c10d._dump_fr_trace_json",
    "lists_groups": "torch.distributed.distributed_c10d:_World.pg_names",
    "hides_group": "torch.distributed.distributed_c10d:_WorldMeta.WORLD",
    "ends_data_workers": "torch.utils.data.dataloader:"
    "_MultiProcessingDataLoaderIter._shutdown_workers",
    "finds_running_loops": "asyncio.base_events:BaseEventLoop._check_running",
    "has_print_options": "torch._tensor_str:PRINT_OPTS",
    "lists_finalizers": "weakref:finalize._registry",
    "counts_ddp_parameters": "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data",
    "lists_gradient_hooks": "torch:Tensor.register_post_accumulate_grad_hook",
    "lists_step_hooks": "torch.optim:Optimizer.register_step_pre_hook",
    "follows_calls": "ipyparallel:Client.send_apply_request",
    "replaces_heartbeats": "ipyparallel.controller.heartmonitor:HeartMonitor.start",
    "shares_globals": "cloudpickle:Pickler.globals_ref",
    "reads_descriptors": "ipykernel.iostream:OutStream._watch_pipe_fd",
    "formats_frames": "IPython.core.compilerop:CachingCompiler.format_code_name"
    if IPython.version_info >= (8,)
    else "IPython.core.ultratb:VerboseTB.format_record",
    "keeps_results": "IPython.core.interactiveshell:InteractiveShell._tee",
    "gloo_notices_ends": "select:epoll",
}
"""A library part that each probe looks for, by the probe's name."""


def missing_features(gone: str, pipe: Connection) -> None:
    """Remove a library part, and send the sentences of ``compat`` about missing features."""
    if gone:
        name, _, path = gone.partition(":")
        *owners, attribute = path.split(".")
        owner: Any = importlib.import_module(name)
        for each in owners:
            owner = getattr(owner, each)
        part = vars(owner).get(attribute)
        if isinstance(part, property) and part.fset:  # only ddpnb sets such a property
            setattr(owner, attribute, property(part.fget))
        elif part is not None:
            delattr(owner, attribute)
        else:  # an instance attribute: hide it with a property that raises
            setattr(owner, attribute, property())
    pipe.send(probe.missing_features())


def missing_features_without_gather(pipe: Connection) -> None:
    """Give two collectives another form, and send the sentences about missing features."""
    METHODS["gather"] = replace(METHODS["gather"], operation="gather_of_another_version_")
    METHODS["reduce"] = replace(METHODS["reduce"], root=0)
    pipe.send((mismatch.missing_checks(), torch_internals.intercepts_collectives.works))


def in_a_process(job: Any, *args: Any) -> Any:
    """Run a job in a new process, in which no probe has run, and return the job's result."""
    process, pipe = begin(job, *args)
    assert pipe.poll(TIMEOUT_SECONDS), "hangs"
    result = pipe.recv()
    process.join()
    return result


def test_there_is_a_way_to_break_each_probe():
    assert LOOKED_AT.keys() == PROBES.keys()


def test_nothing_is_off_with_the_versions_installed():
    assert in_a_process(missing_features, "") == ()
    assert mismatch.missing_checks() == ()


@pytest.mark.parametrize("name", LOOKED_AT)
def test_one_feature_is_off_and_says_so(name: str):
    assert in_a_process(missing_features, LOOKED_AT[name]) == (PROBES[name].sentence,)


def test_collectives_of_another_form_are_named_and_the_rest_are_compared():
    (missing,), is_on = in_a_process(missing_features_without_gather)
    text = ": only `--check` can compare these calls before they run: gather, reduce"
    assert missing.endswith(text)
    assert is_on

"""Libraries as they may look in another version: one private part after the other is gone.

What a library itself still needs is only hidden from ddpnb.
"""

import importlib
import os
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection
from types import FunctionType, ModuleType
from typing import Any

COMPAT = os.path.join("ddpnb", "compat", "")


def hide(owner: type, name: str) -> None:
    """Hide an attribute of a class, or of its instances, from ddpnb."""
    on_class = owner.__dict__.get(name)

    class Hidden:
        def __get__(self, instance: Any, _: type) -> Any:
            if COMPAT in sys._getframe(1).f_code.co_filename:
                raise AttributeError(name)
            if on_class is None:
                return instance.__dict__[name]
            return on_class.__get__(instance, owner)

        def __set__(self, instance: Any, value: Any) -> None:
            instance.__dict__[name] = value

    setattr(owner, name, Hidden())


def without_message_hook(module: Any) -> None:
    original = module.Client.send_apply_request

    def send_apply_request(  # as it is, without the last argument
        self: Any,
        socket: Any,
        f: Any,
        args: Any = None,
        kwargs: Any = None,
        metadata: Any = None,
        track: Any = False,
        ident: Any = None,
    ) -> Any:
        return original(self, socket, f, args, kwargs, metadata, track, ident)

    module.Client.send_apply_request = send_apply_request


def with_another_start(module: Any) -> None:
    original = module.HeartMonitor.start
    module.HeartMonitor.start = lambda self: original(self)


def with_another_registration(module: Any) -> None:
    original = module.Optimizer.register_step_pre_hook
    module.Optimizer.register_step_pre_hook = lambda self, hook: original(self, hook)


def with_other_strategies(module: Any) -> None:
    original = module._C._dynamo.eval_frame.set_code_exec_strategy

    def set_code_exec_strategy(*args: Any) -> None:
        if COMPAT in sys._getframe(1).f_code.co_filename:
            raise AttributeError("set_code_exec_strategy")
        original(*args)

    module._C._dynamo.eval_frame.set_code_exec_strategy = set_code_exec_strategy


def with_fixed_world(module: Any) -> None:
    original = module._WorldMeta.WORLD

    def set_world(owner: Any, group: Any) -> None:
        if COMPAT in sys._getframe(1).f_code.co_filename:
            raise AttributeError("WORLD")
        original.fset(owner, group)

    module._WorldMeta.WORLD = original.setter(set_world)


def with_another_name(name: str) -> Callable[[Any], None]:
    """Rename a function of a module, and wherever the module's functions use it."""

    def apply(module: Any) -> None:
        function, other = getattr(module, name), f"{name}_2"
        delattr(module, name)
        setattr(module, other, function)
        function.__name__ = function.__qualname__ = other
        for each in list(vars(module).values()):
            if isinstance(each, FunctionType) and name in each.__code__.co_names:
                names = (other if used == name else used for used in each.__code__.co_names)
                each.__code__ = each.__code__.replace(co_names=tuple(names))

    return apply


def delete(*path: str) -> Callable[[Any], None]:
    def apply(module: Any) -> None:
        *owners, name = path
        for owner in owners:
            module = getattr(module, owner)
        delattr(module, name)

    return apply


BREAKS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "intercepts_collectives": ("torch.distributed", delete("ProcessGroup", "unbox")),
    "skips_frames": ("torch", with_other_strategies),
    "records_collectives": ("torch", delete("_C", "_distributed_c10d", "_dump_fr_trace_json")),
    "counts_collectives": (
        "torch.distributed",
        delete("ProcessGroup", "_get_sequence_number_for_group"),
    ),
    "lists_groups": (
        "torch.distributed.distributed_c10d",
        lambda module: hide(module._World, "pg_names"),
    ),
    "hides_group": ("torch.distributed.distributed_c10d", with_fixed_world),
    "ends_data_workers": (
        "torch.utils.data.dataloader",
        lambda module: hide(module._MultiProcessingDataLoaderIter, "_shutdown_workers"),
    ),
    "lists_step_hooks": (
        "torch.optim.optimizer",
        with_another_registration,
    ),
    "follows_calls": ("ipyparallel.client.client", without_message_hook),
    "replaces_heartbeats": ("ipyparallel.controller.heartmonitor", with_another_start),
    "shares_globals": (
        "cloudpickle.cloudpickle",
        lambda module: hide(module.Pickler, "globals_ref"),
    ),
    "knows_classes": ("cloudpickle.cloudpickle", with_another_name("_class_setstate")),
}
"""For each probe, by its name: a module, and what to break in it once it has been imported."""


def missing_features(pipe: Connection, module: str) -> None:
    """Send what a module of ``compat`` says, as the first thing in a process."""
    compat = importlib.import_module(module)
    on_gpus = {"can_abort": True} if module.endswith("torch_internals") else {}
    pipe.send(compat.missing_features(**on_gpus))


def missing_features_without(pipe: Connection, module: str, name: str) -> None:
    """Send the same after what a probe looks at has been broken."""
    importlib.import_module(module)
    where, apply = BREAKS[name]
    apply(sys.modules[where])
    missing_features(pipe, module)


def break_all_on_import() -> None:
    """Break everything, each as soon as its module has been imported."""

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, _: ModuleType | None = None) -> Any:
            applied = [apply for module, apply in BREAKS.values() if module == name]
            spec = PathFinder.find_spec(name, path) if applied else None
            if spec is None:
                return None
            loader: Any = spec.loader
            original = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                original(module)
                for apply in applied:
                    apply(module)

            loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    for module, apply in BREAKS.values():
        if module in sys.modules:
            apply(sys.modules[module])

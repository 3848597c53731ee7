"""Seeds and restores random generators and global settings.  Runs on the ranks."""

import builtins
import contextlib
import decimal
import functools
import gc
import locale
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from ddpnb.compat import process_internals


def seed_everything(seed: int | None) -> None:
    """Seed all global random generators, also on GPUs.

    If ``seed`` is None, each process gets a different seed.  Forked processes must be seeded,
    because each of them begins with the random state of the parent process.
    """
    random.seed(seed)
    if seed is not None:
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        return
    torch.seed()
    if "numpy.random" in sys.modules:  # otherwise numpy seeds itself on import
        np.random.seed()


@contextlib.contextmanager
def preserve_globals(
    device: torch.device,
    *,
    is_fresh: bool = False,
    is_measured: bool = False,
    keeps_changes: bool = False,
) -> Iterator[None]:
    """Restore the random state and all global settings when the block ends.

    If ``device`` is a GPU, it is the current device inside the block.

    Args:
        device: the rank's device.
        is_fresh: if True, the block begins with the settings that the rank had when it started.
        is_measured: like ``is_fresh``, but only for settings that change results or speed.
        keeps_changes: if True, the block's settings and its random state stay.
    """
    before = [get() for get, _ in (*_SETTINGS, *_SURROUNDINGS)]
    on_gpu = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    random_state = contextlib.nullcontext() if keeps_changes else preserve_random(device)
    if is_fresh or is_measured:
        restore_settings(_at_start if is_fresh else _at_start[: len(_COMPUTING)])
    try:
        with random_state, on_gpu:
            yield
    finally:
        if not keeps_changes:
            restore_settings(before)


@contextlib.contextmanager
def preserve_random(device: torch.device) -> Iterator[None]:
    """Restore the state of all global random generators when the block ends."""
    # all GPUs, because dp has replicas on several GPUs
    gpus = range(torch.cuda.device_count()) if device.type == "cuda" else ()
    in_numpy, in_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            np.random.set_state(in_numpy)
            random.setstate(in_python)


# -- global settings -----------------------------------------------------------------------

Setting = tuple[Callable[[], Any], Callable[[Any], object]]
"""A function that returns the value of a setting, and a function that sets the value."""


def note_start() -> None:
    """Note the settings of a new rank, with which scripts and comparisons begin."""
    _at_start[:] = [get() for get, _ in _SETTINGS]


def computing_settings() -> list[Any]:
    """Return the values of the settings that change results or speed, for ``restore_settings``."""
    return [get() for get, _ in _COMPUTING]


def restore_settings(values: Sequence[Any]) -> None:
    """Restore the global settings that differ from values that were read before."""
    for (get, set_to), value in zip((*_SETTINGS, *_SURROUNDINGS), values, strict=False):
        if get() != value:
            set_to(value)


def _attributes(owner: Any, *names: str) -> Iterator[Setting]:
    for name in names:
        yield functools.partial(getattr, owner, name), functools.partial(setattr, owner, name)


def _functions(owner: Any, *names: str, between: str = "_") -> Iterator[Setting]:
    for name in names:
        yield getattr(owner, f"get{between}{name}"), getattr(owner, f"set{between}{name}")


def _items(owner: MutableMapping[str, Any]) -> Setting:
    def restore(values: dict[str, Any]) -> None:
        for name in owner.keys() - values.keys() - {"input"}:
            del owner[name]
        owner.update(values)

    return lambda: {key: value for key, value in owner.items() if key != "input"}, restore


def _loggers() -> dict[logging.Logger, tuple[Any, ...]]:
    known = (logging.root, *logging.root.manager.loggerDict.values())
    loggers = (each for each in known if isinstance(each, logging.Logger))
    return {each: (each.level, each.disabled, [*each.handlers]) for each in loggers}


def _restore_loggers(values: dict[logging.Logger, tuple[Any, ...]]) -> None:
    for logger, (*_, handlers) in _loggers().items():
        if logger in values or logger.name.partition(".")[0] not in sys.modules:
            level, logger.disabled, kept = values.get(logger, (logging.NOTSET, False, []))
            for handler in handlers:
                if handler not in kept:
                    handler.close()  # writes the records that the handler has kept
            logger.handlers[:] = kept
            logger.setLevel(level)


def _signal_handlers() -> dict[int, Any]:
    own = signal.SIGINT, signal.SIGCHLD  # of ``cells.interruptible`` and torch's data workers
    return {each: signal.getsignal(each) for each in signal.valid_signals() if each not in own}


def _restore_signal_handlers(values: dict[int, Any]) -> None:
    for number, handler in _signal_handlers().items():
        if handler != values[number] is not None:  # None: not installed by Python code
            signal.signal(number, values[number])


def _restore_filters(filters: list[Any]) -> None:
    vars(warnings)["filters"][:] = filters


def _umask() -> int:
    os.umask(mask := os.umask(0o77))
    return mask


def _matmul_precision() -> str:
    with contextlib.suppress(RuntimeError):  # torch cannot name a mixture of old and new settings
        return torch.get_float32_matmul_precision()
    return ""


_COMPUTING: tuple[Setting, ...] = (
    *_functions(torch, "default_dtype", "num_threads", "deterministic_debug_mode"),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (
        lambda: str(torch.get_default_device()),
        lambda name: torch.set_default_device(None if name == "cpu" else name),
    ),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda values: torch.autograd.set_detect_anomaly(*values),
    ),
    *_attributes(torch.backends.cudnn, "enabled", "benchmark", "deterministic", "allow_tf32"),
    (_matmul_precision, torch.set_float32_matmul_precision),
    (
        lambda: not torch.tensor(1e-310, dtype=torch.float64, device="cpu").mul(1),
        torch.set_flush_denormal,
    ),
    (
        lambda: [*map(torch.is_autocast_enabled, ("cpu", "cuda"))],
        lambda values: [*map(torch.set_autocast_enabled, ("cpu", "cuda"), values)],
    ),
    (np.geterr, lambda actions: np.seterr(**actions)),
    *_functions(sys, "recursionlimit", "switchinterval", between=""),
    # cProfile's objects are no functions
    (sys.getprofile, lambda it: it.enable() if hasattr(it, "enable") else sys.setprofile(it)),
    (gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable()),
)
_SETTINGS: tuple[Setting, ...] = (
    *_COMPUTING,
    (process_internals.print_options, lambda options: torch.set_printoptions(**options)),
    (np.get_printoptions, lambda options: np.set_printoptions(**options)),
    (
        lambda: decimal.getcontext().prec,
        lambda digits: setattr(decimal.getcontext(), "prec", digits),
    ),
    (lambda: locale.setlocale(locale.LC_ALL), lambda name: locale.setlocale(locale.LC_ALL, name)),
    *_functions(socket, "defaulttimeout", between=""),
    (
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda name: multiprocessing.set_start_method(name, force=True),
    ),
    (_umask, os.umask),
    (
        lambda: signal.getitimer(signal.ITIMER_REAL),
        lambda timer: signal.setitimer(signal.ITIMER_REAL, *timer),
    ),
    (_signal_handlers, _restore_signal_handlers),
    (_loggers, _restore_loggers),
    *_attributes(logging.root.manager, "disable"),
    *_attributes(sys, "excepthook", "unraisablehook"),
    *_attributes(threading, "excepthook"),
    *_attributes(tempfile, "tempdir"),
    *_attributes(sys, "stdin", "stdout", "stderr"),
    *_attributes(warnings, "showwarning"),
    (lambda: [*warnings.filters], _restore_filters),
    _items(vars(builtins)),
)
_SURROUNDINGS: tuple[Setting, ...] = (_items(os.environ), *_attributes(sys, "breakpointhook"))
"""Settings that a script and a comparison take over from cells, and restore at the end."""
_at_start: list[Any] = []

"""Lets the user's code run event loops although the engine's loop runs.  Runs on the ranks.

A thread can run only one asyncio loop, and the engine's loop runs in the thread of the user's code.
So ddpnb hides the engine's loop from this code.  In a cell, ``create_task`` must find a running
loop, as in a notebook.  So the loop of cells counts as running, except for functions that start
another loop, such as ``asyncio.run``.
"""

import asyncio
import os
import threading
from asyncio import base_events, runners
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from ddpnb.compat.probe import Probe

events: Any = asyncio.events
tasks: Any = asyncio.tasks
_get, _set = events._get_running_loop, events._set_running_loop
_loops: list[asyncio.AbstractEventLoop] = []
"""The loop that all cells share.  A task that a cell creates can continue in a later cell."""


@Probe("Python", "asyncio.run() and a top-level await do not work on the ranks")
def finds_running_loops() -> bool:
    """Return True if asyncio uses the functions that ``users_loop`` replaces."""
    loops: Any = base_events.BaseEventLoop
    begin = getattr(loops, "_run_forever_setup", loops.run_forever)
    names = {*runners.Runner.run.__code__.co_names, *loops._check_running.__code__.co_names}
    names &= {"_get_running_loop"}
    return len(names) == 1 and "_set_running_loop" in begin.__code__.co_names


@contextmanager
def users_loop(*, is_cell: bool) -> Iterator[None]:
    """Hide the engine's loop.  A cell gets the loop of cells; other code gets a new loop."""
    if not finds_running_loops.works:
        yield
        return
    here, policy = (os.getpid(), threading.get_ident()), events._event_loop_policy
    if is_cell and (not _loops or _loops[0].is_closed()):
        _loops[:] = [asyncio.new_event_loop()]
    own = _loops[0] if is_cell else asyncio.new_event_loop()
    engines, lowest = _get(), own if is_cell else None
    left: dict[Any, Any] = {}  # the current task of each loop that another loop interrupts

    def get_running_loop() -> Any:
        return None if (running := _get()) is lowest else running

    def set_running_loop(loop: Any) -> None:
        if here == (os.getpid(), threading.get_ident()):  # otherwise a child or another thread
            switch(lowest if loop is None else loop)
        else:
            _set(loop)

    def switch(loop: Any) -> None:
        if (running := _get()) is loop:
            return
        if running is not None and (task := asyncio.current_task(running)) is not None:
            tasks._leave_task(running, task)
            left[running] = task
        _set(loop)
        if (task := left.pop(loop, None)) is not None:
            tasks._enter_task(loop, task)

    switch(lowest)
    asyncio.set_event_loop(own)
    events._get_running_loop, events._set_running_loop = get_running_loop, set_running_loop
    try:
        yield
    finally:
        events._get_running_loop, events._set_running_loop = _get, _set
        events._event_loop_policy = policy  # the code may have chosen another policy
        asyncio.set_event_loop(engines)
        switch(engines)
        if not is_cell and not own.is_running():
            own.close()


def run_in_cell(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run the coroutine of a cell in the loop of cells.  An interrupt also cancels the task."""
    loop = asyncio.get_event_loop()
    task = loop.create_task(coroutine)
    try:
        return loop.run_until_complete(task)
    finally:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(task)


def awaiting(frames: Iterable[FrameType]) -> list[FrameType]:
    """Return the frames of a cell's coroutine that waits, innermost first."""
    found: list[FrameType] = []
    for frame in frames:
        coroutine: Any = (
            frame.f_locals["coroutine"] if frame.f_code is run_in_cell.__code__ else None
        )
        while (waiting := getattr(coroutine, "cr_frame", None)) is not None:
            found.insert(0, waiting)
            coroutine = coroutine.cr_await
    return found

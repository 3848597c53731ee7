"""What is a rank as a process?  An ipyparallel engine that has joined the group.  (Rank side.)"""

import asyncio
import os
from collections.abc import Coroutine, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from ipyparallel.engine.app import IPEngine
from traitlets import Instance

from ddpnb.rank.control import ControlThread, main_thread_stack
from ddpnb.rank.group import Group


class RankEngine(IPEngine):  # type: ignore[misc]  # ipyparallel has no type hints
    """The engine application of one rank; ``RankEngine.instance()`` finds it."""

    group = Instance(Group)
    publisher: Any = None
    """The publisher of the cell or run in progress."""

    async def complete_registration(self, *args: Any) -> None:
        """Prepare the shell as soon as the engine has one."""
        await super().complete_registration(*args)
        shell = self.kernel.shell
        shell.loop_runner = CellLoop()
        shell.user_ns.update(
            rank=self.group.rank,
            local_rank=self.group.local_rank,
            world_size=self.group.world_size,
            device=self.group.device,
        )


class CellLoop:
    """Runs a cell's top-level ``await`` although the engine's own loop is running.

    The engine's loop cannot be entered a second time; ipykernel's way round that
    needs a thread that ipyparallel's engines do not have, and hangs.  So the cells
    of a rank share a loop of their own, as they do in a terminal's IPython.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def __call__(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run ``coroutine`` to its end on the cells' loop."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            return self.loop.run_until_complete(coroutine)
        finally:
            asyncio._set_running_loop(outer)


def run(settings: Mapping[str, Any], *, pipe: Connection, folder: Path) -> None:
    """Join the process group, then serve as an ipyparallel engine until told to stop.

    Args:
        settings: ``device``, ``shares_device``, ``backend``, ``num_threads``,
            ``generation``, ``cells_folder`` (where cells run) and
            ``engine_arguments`` (ipyparallel's command line).
        pipe: the pipe to the fork server.
        folder: the cluster's private run folder.
    """
    os.chdir(folder)  # where ipyparallel looks for configuration: nowhere of the user's
    torch.set_num_threads(settings["num_threads"])
    group = group_of(settings, folder)
    handlers = {"cut": group.cut, "stack": main_thread_stack}
    ControlThread(group.rank, pipe, handlers).start()
    group.join(settings["generation"])
    app = RankEngine.instance(group=group)
    app.initialize(settings["engine_arguments"])
    os.chdir(settings["cells_folder"])
    app.start()


def group_of(settings: Mapping[str, Any], folder: Path) -> Group:
    """Return this rank's group, not yet joined; its place stands where torchrun puts it."""
    device = torch.device(settings["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return Group(
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        backend=settings["backend"],
        device=device,
        shares_device=settings["shares_device"],
        folder=folder,
    )

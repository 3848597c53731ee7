"""A real kernel, driven as a Jupyter client drives it."""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from types import MappingProxyType
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

from tests.cluster.rig import is_alive

ANSI = re.compile(r"\x1b\[[0-9;]*m")
Output = dict[str, Any]
SHOWN = ("stream", "error", "display_data", "execute_result")


@dataclass(slots=True, kw_only=True)
class Cell:
    """What stands under a cell, as a client shows and saves it."""

    request: str
    """The id by which its messages name it."""
    outputs: list[Output] = field(default_factory=list)
    number: int = 0
    """The ``n`` of ``In [n]``."""
    status: str = ""
    clears_next: bool = False
    """Whether the next output takes the place of all that stands there."""
    num_updates: int = 0
    """How often something shown was replaced."""
    seconds: float = 0.0

    def stream(self, name: str) -> str:
        return "".join(o["text"] for o in self.outputs if o.get("name") == name)

    @property
    def stdout(self) -> str:
        return self.stream("stdout")

    @property
    def stderr(self) -> str:
        return self.stream("stderr")

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()

    @property
    def by_rank(self) -> dict[int, list[str]]:
        """What each rank printed, whichever lines were shown as one."""
        said: dict[int, list[str]] = {}
        for label, text in re.findall(r"^\[([\d,-]+)\] ?(.*)$", self.stdout, re.MULTILINE):
            for part in label.split(","):
                first, _, last = part.partition("-")
                for rank in range(int(first), int(last or first) + 1):
                    said.setdefault(rank, []).append(text)
        return said

    @property
    def error(self) -> str:
        """The class of the exception; empty where the cell ended well."""
        return next((o["ename"] for o in self.outputs if o["type"] == "error"), "")

    @property
    def error_text(self) -> str:
        """What the client shows of the exception, without colours."""
        lines = next((o["traceback"] for o in self.outputs if o["type"] == "error"), [])
        return ANSI.sub("", "\n".join(lines))

    @property
    def passed(self) -> "Cell":
        """The cell itself, which has to have ended well."""
        assert not self.error, self.error_text
        return self

    @property
    def refusal(self) -> str:
        """The one sentence of a cell that a ``UserError`` has to have ended."""
        assert self.error == "UserError", self.text
        (sentence,) = self.error_text.splitlines()
        return sentence

    def bundles(self, mime: str) -> list[str]:
        return [o["data"][mime] for o in self.outputs if mime in o.get("data", {})]

    @property
    def text(self) -> str:
        """All of it that is text, in order: streams, displays, the exception."""
        parts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in self.outputs]
        return ANSI.sub("", "\n".join(parts)) + self.error_text


def both(*lines: str) -> dict[int, list[str]]:
    """What ``Cell.by_rank`` is where two ranks print the same."""
    return {0: list(lines), 1: list(lines)}


class Kernel:
    """A kernel of its own process, in a folder of its own.

    Args:
        folder: its working directory.
        environment: variables that it has besides this process's own.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self.folder = folder
        self.manager = KernelManager(kernel_name="python3")
        # In pytest's environment ipykernel shows nothing that child processes write.
        env = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
        self.manager.start_kernel(cwd=str(folder), env=env | environment)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.cells: dict[str, Cell] = {}
        """Every cell by its request's id: late output finds its place here."""
        self._places: dict[str, list[Output]] = {}

    def run(self, source: str, *, timeout: float = 60.0) -> Cell:
        """Run a cell to its end."""
        return self.wait(self.begin(source), timeout=timeout)

    def answer(self, source: str, *lines: str, timeout: float = 60.0) -> tuple[Cell, list[str]]:
        """Run a cell and answer what it asks; return it, and the prompts."""
        cell, prompts = self.begin(source, allow_stdin=True), []
        for line in lines:
            prompts.append(self.client.get_stdin_msg(timeout=timeout)["content"]["prompt"])
            self.client.input(line)
        return self.wait(cell, timeout=timeout), prompts

    def begin(self, source: str, *, allow_stdin: bool = False) -> Cell:
        """Send a cell, and do not wait for its end."""
        request = self.client.execute(source, allow_stdin=allow_stdin)
        self.cells[request] = Cell(request=request)
        return self.cells[request]

    def wait(self, cell: Cell, *, timeout: float = 60.0) -> Cell:
        """Return the cell once it has ended."""
        began = time.monotonic()
        reply = self._reply(cell.request, timeout)
        for parent, kind, content in self.messages(timeout):
            if parent == cell.request and kind == "status" and content["execution_state"] == "idle":
                break
        cell.seconds = time.monotonic() - began
        cell.number, cell.status = reply["execution_count"], reply["status"]
        return cell

    def wait_for_text(self, cell: Cell, text: str, *, timeout: float = 30.0) -> None:
        """Wait until some text stands under a cell."""
        self.wait_until(lambda: text in cell.text, timeout=timeout)

    def wait_until(self, condition: Callable[[], bool], *, timeout: float = 30.0) -> None:
        """Take in output, also of cells that have ended, until a condition holds."""
        messages = self.messages(timeout)
        while not condition():
            next(messages)

    def interrupt(self) -> None:
        """Press the square button."""
        self.manager.interrupt_kernel()

    def interrupted(self, source: str, shown: str, *, timeout: float = 30.0) -> Cell:
        """Run a cell, and press the square button once it has shown something."""
        cell = self.begin(source)
        self.wait_for_text(cell, shown, timeout=timeout)
        self.interrupt()
        return self.wait(cell)

    def complete(self, code: str) -> list[str]:
        """Press Tab at the end of ``code``."""
        return list(self._completions(code)["matches"])

    def inspect(self, code: str) -> str:
        """Press Shift+Tab at the end of ``code``."""
        reply = self._reply(self.client.inspect(code, len(code)), 20.0)
        return ANSI.sub("", reply["data"].get("text/plain", ""))

    def kinds(self, code: str) -> dict[str, str]:
        """Press Tab; return what each completion is said to be, in the order of the list."""
        typed = self._completions(code)["metadata"]["_jupyter_types_experimental"]
        return {each["text"]: each["type"] for each in typed}

    def value(self, expression: str) -> str:
        """Return what ``print(expression)`` prints in the notebook."""
        return self.run(f"print({expression})").stdout.rstrip("\n")

    def wait_for_value(self, expression: str, text: str, *, timeout: float = 60.0) -> None:
        """Ask again and again until what ``print(expression)`` prints has a text in it."""
        deadline = time.monotonic() + timeout
        while text not in (found := self.value(expression)):
            assert time.monotonic() < deadline, f"{expression} is still {found}, without {text}"
            time.sleep(0.1)

    @property
    def processes(self) -> list[psutil.Process]:
        """All that it has started and that lives, and what that has started."""
        started = psutil.Process(self.manager.provisioner.pid).children(recursive=True)
        return [process for process in started if is_alive(process)]

    @property
    def run_folder(self) -> Path:
        """Where its cluster has its files."""
        return Path(
            self.value("__import__('ddpnb').session.session.this_session()._cluster.folder")
        )

    def kill_and_restart(self) -> None:
        """Kill the kernel by SIGKILL, and start one anew in its place, with ddpnb."""
        self.manager.restart_kernel(now=True)
        self.client.wait_for_ready(timeout=60)
        self.run("%load_ext ddpnb")

    def stop(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)

    def messages(self, timeout: float) -> Iterator[tuple[str, str, Output]]:
        """Yield output messages as they come, each put where it belongs."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(deadline - time.monotonic(), 0.01))
            except Empty:
                raise TimeoutError(f"no such message within {timeout} s") from None
            parent = message["parent_header"].get("msg_id", "")
            self._place(parent, message["msg_type"], message["content"])
            yield parent, message["msg_type"], message["content"]

    def _place(self, parent: str, kind: str, content: Output) -> None:
        cell = self.cells.get(parent)
        if cell is None:
            return
        if kind == "clear_output":
            cell.clears_next = True
        if (kind == "clear_output" and not content["wait"]) or (cell.clears_next and kind in SHOWN):
            cell.outputs.clear()
            cell.clears_next = False
        match kind:
            case "stream" if cell.outputs and cell.outputs[-1].get("name") == content["name"]:
                cell.outputs[-1]["text"] += content["text"]  # as clients do
            case "stream" | "error" | "display_data" | "execute_result":
                cell.outputs.append({"type": kind, **content})
                if place := content.get("transient", {}).get("display_id"):
                    self._places.setdefault(place, []).append(cell.outputs[-1])
            case "update_display_data":
                cell.num_updates += 1
                for output in self._places.get(content["transient"]["display_id"], []):
                    output["data"] = content["data"]

    def _completions(self, code: str) -> Output:
        return self._reply(self.client.complete(code, len(code)), 20.0)

    def _reply(self, request: str, timeout: float) -> Output:
        deadline = time.monotonic() + timeout
        while True:
            try:
                reply = self.client.get_shell_msg(timeout=max(deadline - time.monotonic(), 0.01))
            except Empty:
                raise TimeoutError(f"the cell did not end within {timeout} s") from None
            if reply["parent_header"].get("msg_id") == request:
                content: Output = reply["content"]
                return content


@contextmanager
def kernel_in(
    folder: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Kernel]:
    """Yield a kernel with ddpnb in a folder with a ``data/``: no run lands in the repository."""
    (folder / "data").mkdir()
    kernel = Kernel(folder, environment)
    try:
        kernel.run("%load_ext ddpnb")
        yield kernel
    finally:
        kernel.stop()

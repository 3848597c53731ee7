"""A real kernel, driven as a Jupyter client drives it."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """A cell and its outputs, as a Jupyter client shows and saves them."""

    request: str
    """The id of the execute request. All messages of the cell contain this id."""
    outputs: list[Output] = field(default_factory=list)
    number: int = 0
    """The ``n`` of ``In [n]``."""
    status: str = ""
    clears_next: bool = False
    """True if the next output replaces all outputs."""
    num_updates: int = 0
    """The number of times that a display was updated."""
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
        """The lines that each rank printed. Merged lines count for each of their ranks."""
        said: dict[int, list[str]] = {}
        for label, text in re.findall(r"^\[([\d,-]+)\] ?(.*)$", self.stdout, re.MULTILINE):
            for part in label.split(","):
                first, _, last = part.partition("-")
                for rank in range(int(first), int(last or first) + 1):
                    said.setdefault(rank, []).append(text)
        return said

    @property
    def error(self) -> str:
        """The exception's class name, empty if the cell succeeded."""
        return next((o["ename"] for o in self.outputs if o["type"] == "error"), "")

    @property
    def error_text(self) -> str:
        """The exception as the client shows it, without colours."""
        lines = next((o["traceback"] for o in self.outputs if o["type"] == "error"), [])
        return ANSI.sub("", "\n".join(lines))

    @property
    def passed(self) -> "Cell":
        """The cell itself. Raises an AssertionError if the cell failed."""
        assert not self.error, self.error_text
        return self

    @property
    def refusal(self) -> str:
        """The sentence of the cell's error, which must be a ``UserError`` of one line."""
        assert self.error == "UserError", self.text
        (sentence,) = self.error_text.splitlines()
        return sentence

    def bundles(self, mime: str) -> list[str]:
        return [o["data"][mime] for o in self.outputs if mime in o.get("data", {})]

    @property
    def pictures(self) -> list[str]:
        """The PNG pictures in base64, also those inside HTML."""
        inside = r'src="data:image/png;base64,([^"]+)"'
        return [
            picture
            for output in self.outputs
            for data in [output.get("data", {})]
            for picture in [
                *([data["image/png"]] if "image/png" in data else []),
                *re.findall(inside, data.get("text/html", "")),
            ]
        ]

    @property
    def text(self) -> str:
        parts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in self.outputs]
        return ANSI.sub("", "\n".join(parts)) + self.error_text


def both(*lines: str) -> dict[int, list[str]]:
    """Return the ``Cell.by_rank`` of two ranks that print the same lines."""
    return {0: list(lines), 1: list(lines)}


class Kernel:
    """A new process that runs a Jupyter kernel.

    Args:
        folder: the kernel's working directory.
        environment: environment variables, in addition to those of this process.
        first: the first words of the command that starts the kernel.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
        first: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.manager = KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv[:1] = *first, sys.executable
        # With pytest's variables, ipykernel hides the output of child processes.
        env = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
        self.manager.start_kernel(cwd=str(folder), env=env | environment)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.cells: dict[str, Cell] = {}
        """Every cell by the id of its request, so that late output reaches its cell."""
        self._places: dict[str, list[Output]] = {}

    def run(self, source: str, *, timeout: float = 60.0) -> Cell:
        return self.wait(self.begin(source), timeout=timeout)

    def answer(self, source: str, *lines: str, timeout: float = 60.0) -> tuple[Cell, list[str]]:
        """Run a cell and answer its prompts with ``lines``. Return the cell and the prompts."""
        cell, prompts = self.begin(source, allow_stdin=True), []
        for line in lines:
            prompts.append(self.client.get_stdin_msg(timeout=timeout)["content"]["prompt"])
            self.client.input(line)
        return self.wait(cell, timeout=timeout), prompts

    def begin(self, source: str, *, allow_stdin: bool = False) -> Cell:
        """Send a cell without waiting for its end."""
        # An error must not end the next cell. ipykernel 6 would abort it if it arrives soon.
        request = self.client.execute(source, allow_stdin=allow_stdin, stop_on_error=False)
        self.cells[request] = Cell(request=request)
        return self.cells[request]

    def wait(self, cell: Cell, *, timeout: float = 60.0) -> Cell:
        began = time.monotonic()
        reply = self._reply(cell.request, timeout)
        for parent, kind, content in self.messages(timeout):
            if parent == cell.request and kind == "status" and content["execution_state"] == "idle":
                break
        cell.seconds = time.monotonic() - began
        cell.number, cell.status = reply["execution_count"], reply["status"]
        return cell

    def wait_for_text(self, cell: Cell, text: str, *, timeout: float = 30.0) -> None:
        self.wait_until(lambda: text in cell.text, timeout=timeout)

    def wait_until(self, condition: Callable[[], bool], *, timeout: float = 30.0) -> None:
        """Process output, including output of ended cells, until a condition holds."""
        messages = self.messages(timeout)
        while not condition():
            next(messages)

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def interrupted(self, source: str, shown: str, *, timeout: float = 30.0) -> Cell:
        """Run a cell, and interrupt the kernel as soon as the cell shows a text."""
        cell = self.begin(source)
        self.wait_for_text(cell, shown, timeout=timeout)
        self.interrupt()
        return self.wait(cell)

    def complete(self, code: str) -> list[str]:
        return list(self._completions(code)["matches"])

    def inspect(self, code: str) -> str:
        """Return the text that Shift+Tab shows at the end of ``code``."""
        return ANSI.sub("", self.described(code).get("text/plain", ""))

    def described(self, code: str) -> Output:
        """Return the MIME bundle with which the kernel answers Shift+Tab."""
        bundle: Output = self._reply(self.client.inspect(code, len(code)), 20.0)["data"]
        return bundle

    def kinds(self, code: str) -> dict[str, str]:
        """Return each completion that Tab offers, with its type, in the order of the list."""
        typed = self._completions(code)["metadata"]["_jupyter_types_experimental"]
        return {each["text"]: each["type"] for each in typed}

    def value(self, expression: str) -> str:
        """Return the output of ``print(expression)`` in the notebook."""
        return self.run(f"print({expression})").stdout.rstrip("\n")

    def wait_for_value(self, expression: str, text: str, *, timeout: float = 60.0) -> None:
        """Repeat ``print(expression)`` until its output contains a text."""
        deadline = time.monotonic() + timeout
        while text not in (found := self.value(expression)):
            assert time.monotonic() < deadline, f"{expression} is still {found}, not {text}"
            time.sleep(0.1)

    @property
    def processes(self) -> list[psutil.Process]:
        started = psutil.Process(self.manager.provisioner.pid).children(recursive=True)
        return [process for process in started if is_alive(process)]

    @property
    def run_folder(self) -> Path:
        return Path(
            self.value("__import__('ddpnb').session.session.this_session()._cluster.folder")
        )

    def kill_and_restart(self) -> None:
        self.manager.restart_kernel(now=True)
        self.client.wait_for_ready(timeout=60)
        self.run("%load_ext ddpnb")

    def stop(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)

    def messages(self, timeout: float) -> Iterator[tuple[str, str, Output]]:
        """Add each output message to its cell, then yield the message."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(deadline - time.monotonic(), 0.01))
            except Empty:
                raise TimeoutError(f"no expected message within {timeout} s") from None
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
    """Yield a kernel with ddpnb. The folder gets a ``data/``, so that it stores all runs."""
    (folder / "data").mkdir()
    kernel = Kernel(folder, environment)
    try:
        kernel.run("%load_ext ddpnb")
        yield kernel
    finally:
        kernel.stop()

"""Runs code in a real Jupyter kernel."""

import contextlib
import json
from collections.abc import Iterator

from jupyter_client.manager import KernelManager, start_new_kernel

TIMEOUT_SECONDS = 600


class Kernel:
    """A running kernel that executes code and returns the printed text."""

    def __init__(self, manager: KernelManager) -> None:
        self.interrupt = manager.interrupt_kernel
        self._client = manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def run(self, source: str) -> str:
        printed: list[str] = []

        def on_message(message: dict) -> None:
            if message["header"]["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        reply = self._client.execute_interactive(
            source, timeout=TIMEOUT_SECONDS, output_hook=on_message
        )
        if reply["content"]["status"] != "ok":
            raise RuntimeError("\n".join(reply["content"]["traceback"]))
        return "".join(printed)

    def value(self, source: str) -> object:
        """Run code and return the value of its last printed line, which must be JSON."""
        return json.loads(self.run(source).strip().splitlines()[-1])


@contextlib.contextmanager
def kernel() -> Iterator[Kernel]:
    manager, client = start_new_kernel(kernel_name="python3")
    client.stop_channels()
    try:
        yield Kernel(manager)
    finally:
        manager.shutdown_kernel(now=False)

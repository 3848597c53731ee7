"""A real JupyterLab server, and pages of a real Chromium that show it."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page

from tests.programs import daemon, find_program

CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
START_TIMEOUT_SECONDS = 60
KERNEL_IS_THERE = """() => {
  const kernel = jupyterapp.shell.currentWidget?.context?.sessionContext?.session?.kernel
  return kernel?.connectionStatus === "connected" && kernel.status === "idle"
}"""
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"


def wait_for_kernel(page: Page) -> None:
    """Wait for the kernel, because JupyterLab ignores commands to run cells without a kernel."""
    page.wait_for_function(KERNEL_IS_THERE, timeout=90_000)


def open_notebook(page: Page, address: str, path: str) -> None:
    page.goto(address.format(path=path))
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
    page.wait_for_selector(".jp-NotebookPanel-toolbar", timeout=90_000)
    page.add_style_tag(content=".Toastify { display: none }")  # JupyterLab's notifications


def find_chromium() -> str:
    """Return Chromium's path. If Chromium is not installed, skip the test, or fail it in CI."""
    names = ["chromium", "chromium-browser", "google-chrome"]
    return find_program(names, "Chromium is not installed (apt-get install chromium)")


@contextlib.contextmanager
def lab_server(folder: Path) -> Iterator[str]:
    """Run JupyterLab on ``folder``. Yield the address of its ``/lab``, with a token."""
    token = secrets.token_hex(16)
    runtime = folder / ".runtime"
    words = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--expose-app-in-browser",
        "--ServerApp.port=0",
        "--ServerApp.ip=127.0.0.1",
        f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={folder}",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    own = {
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / ".settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / ".workspaces"),
    }
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with daemon(words, env=os.environ | own, **silent) as process:
        yield f"{address_of(process, runtime)}lab/tree/{{path}}?token={token}&reset"


def address_of(process: subprocess.Popen[bytes], runtime: Path) -> str:
    """Wait until the server answers, and return its address."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, "JupyterLab ended while starting"
        for file in runtime.glob("jpserver-*.json"):
            with contextlib.suppress(ValueError, urllib.error.URLError):
                url = str(json.loads(file.read_text())["url"])
                urllib.request.urlopen(f"{url}api", timeout=5).close()
                return url
        time.sleep(0.2)
    raise TimeoutError("JupyterLab did not answer")

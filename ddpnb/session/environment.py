"""Collects the facts that a bug report needs.  Runs in the kernel, also without IPython."""

import contextlib
import importlib
import os
import platform
import re
import sys
from importlib.metadata import distributions
from pathlib import Path

from ddpnb.compat.probe import missing_features
from ddpnb.protocol.cores import describe_cores
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.processes import gpu_driver, may_have_gpus
from ddpnb.results.comparison import describe_ranks
from ddpnb.results.folders import runs_folder

PINNED = re.compile(
    "ddpnb|torch|nvidia-(nccl|cuda-runtime).*|ipython|ipykernel|ipyparallel|ipywidgets|jupyter-client"
    "|jupyter-server|jupyterlab|notebook|google-colab|numpy|pandas|psutil|pyzmq|tornado|traitlets"
)
FRONTENDS = re.compile("^(COLAB|KAGGLE|DATABRICKS|SAGEMAKER|VSCODE|JUPYTERHUB|BINDER|JPY)_", re.M)
"""How the names of the environment variables begin that frontends set."""


def debug_info(root: Path = Path("/")) -> str:
    """Return versions, devices and disabled features, as text to paste into a bug report.

    The text has no names of users, hosts or folders.  If ranks run, it also describes the ranks.
    """
    named = [(re.sub("[-_.]+", "-", each.name or "").lower(), each) for each in distributions()]
    facts = {name: each.version for name, each in reversed(named) if PINNED.fullmatch(name)}
    models = [each.read_text() for each in root.glob("proc/driver/nvidia/gpus/*/information")]
    gpus = re.findall(r"Model:\s*(.+)", "\n".join(models))
    facts |= {
        "Python": platform.python_version(),
        "system": platform.platform(),
        "frontend": ", ".join(sorted({*FRONTENDS.findall("\n".join(os.environ))})) or "unknown",
        "cores": describe_cores(),
        "GPUs": ", ".join(gpus) or ("unknown" if may_have_gpus(root) else "none"),
        "GPU driver": gpu_driver(root) or "none",
        "stored runs": "DDPNB_DATA" if os.environ.get("DDPNB_DATA") else _place(runs_folder()),
    }
    module, cluster = sys.modules.get("ddpnb.session.session"), None
    with contextlib.suppress(UserError):  # no cluster is running
        cluster = module and module.this_session().cluster(allow_lost=True)
    if cluster:
        described = describe_ranks(cluster.states)
        facts |= {f"cluster: {name}": described[name] for name in described if name != "hosts"}
        facts["disabled"] = "; ".join(cluster.missing) or "nothing"
    else:
        for name in ("cloudpickle", "ipykernel", "ipyparallel"):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"ddpnb.compat.{name}_internals")
        facts["disabled"] = "; ".join((*missing_features(), "torch: tested only on ranks"))
    return "\n".join(f"{name}: {fact}" for name, fact in facts.items())


def _place(folder: Path) -> str:
    """Describe the folder of the stored runs without names of the user's folders."""
    path = Path(os.path.relpath(folder))
    existing = next(filter(os.path.exists, (folder, *folder.parents)))
    text = str(path) if {*path.parts} <= {"..", "data", "runs"} else "outside this project"
    return text if os.access(existing, os.W_OK) else f"{text}, which is read-only"

"""Where are runs kept?  (Notebook side.)"""

from pathlib import Path


def runs_folder(start: Path | None = None) -> Path:
    """Return the folder that runs are stored under; it need not exist.

    It is ``data/runs`` in the project around ``start``: the nearest folder upwards
    that holds ``data/`` beside ``pyproject.toml`` or ``notebooks/``.  Outside a
    project it is ``data/runs`` in ``start`` itself.

    Args:
        start: where to look from; the working directory if not given.
    """
    here = (start or Path.cwd()).resolve()
    project = next((folder for folder in (here, *here.parents) if _is_project(folder)), here)
    return project / "data" / "runs"


def _is_project(folder: Path) -> bool:
    marks = (folder / "pyproject.toml").is_file() or (folder / "notebooks").is_dir()
    return marks and (folder / "data").is_dir()

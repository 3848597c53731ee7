"""Opens the store of a notebook, in the first folder that can be used.  Runs in the kernel."""

import os
from pathlib import Path

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.processes import working_folder
from ddpnb.results.folders import runs_folder, temporary_folder, users_folder
from ddpnb.results.store import ELSEWHERE, FILE_NAME, Store
from ddpnb.results.writer import StoreError


def open_store(start: Path | None = None) -> tuple[Store, str]:
    """Open the store for a notebook in ``start``; return it with a note, which is often empty.

    The folder is ``DDPNB_DATA``, if this variable is set, or ``runs_folder``.  If the user cannot
    write to ``runs_folder``, the note names a folder in the user's home or a temporary folder.  A
    new store in another folder begins with the runs that ``runs_folder`` has.
    """
    project, chosen, note = runs_folder(start), os.environ.get("DDPNB_DATA", ""), ""
    has_runs = os.access(project / FILE_NAME, os.R_OK) and os.path.getsize(project / FILE_NAME)
    store = _store_in(working_folder() / os.path.expanduser(chosen) if chosen else project)
    if chosen and store is None:
        raise UserError(
            f"DDPNB_DATA is {chosen}, but you cannot write to this folder. Set the environment "
            "variable DDPNB_DATA to another folder: %env DDPNB_DATA=FOLDER."
        )
    if store is None:
        store = _store_in(users_folder() / project.parents[1].relative_to(project.anchor))
        until = "" if store else " until the kernel ends"
        store = store or Store(temporary_folder())
        instead = f"{store.folder}{until} {ELSEWHERE}"
        note = f"You cannot write to {project}, so ddpnb stores runs in {instead}."
    if has_runs and store.folder != project and not store.list():
        old = Store(project)
        old.move(store.folder)
        return old, note
    return store, note


def _store_in(folder: Path) -> Store | None:
    """Return the store in a folder, which may not exist yet, or None if the user cannot write."""
    there = [each for each in (folder, folder / FILE_NAME) if os.path.exists(each)]
    if not (folder.is_absolute() and all(os.access(each, os.W_OK) for each in there)):
        return None
    try:
        return Store(folder)
    except StoreError:
        if len(there) == 2 and os.path.getsize(there[1]):  # has runs, perhaps of another version
            raise
        return None

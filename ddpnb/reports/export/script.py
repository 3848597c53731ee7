"""Export of a comparison as a script for torchrun.  Runs in the kernel.

The script needs only torch.  The script trains with DistributedDataParallel as the notebook did:
with the same initial weights, the same order of samples and the same steps.  The script contains
the cell or the built-in task, and the functions of ``ddpnb/rank/script`` that the run uses.
"""

import ast
import builtins
import json
import math
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpnb.protocol.catalogue import CELL_TASK, PACKAGE, STRATEGIES, TASKS
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.notation import parse_strategy, parse_task
from ddpnb.protocol.variables import NOTEBOOK_FUNCTIONS
from ddpnb.reports.export.assembly import CELL_NAMES, Source, imports_text, joined, needed, parse
from ddpnb.results.comparison import Comparison, body_of, chosen

FOLDER = PACKAGE / "rank/script"

CARRIED = {
    *("task", "num_epochs", "min_seconds", "batch_size", "batch_per_worker", "learning_rate"),
    *("momentum", "seed", "accumulate", "amp", "clip", "num_data_workers"),
}
"""Settings that the script supports.  If a comparison uses other settings, a note lists them."""


def write_script(comparison: Comparison, path: Path) -> str:
    """Write the script to a file.  For the task ``digits``, also copy the file with the images.

    Returns:
        Notes on how the script differs from the notebook, and the command that runs the script.

    Raises:
        UserError: the function ``script`` cannot export the comparison.
    """
    notes = [f"The existing file {path} was replaced."] * path.exists()
    checkpoint = Path(f"{path.stem}.pt")
    resumes = f"The script resumes from {checkpoint}. To start again, delete this file."
    notes += [resumes] * checkpoint.exists()
    path.write_text(script(comparison, path.name), encoding="utf-8")
    spec = _spec_of(comparison)
    if parse_task(spec.task).name == "digits":  # the task reads its images from a file
        shutil.copy(TASKS["digits"].file.with_name("digits.npz"), path.parent)
    return "\n".join(
        [
            "a script for torchrun that trains with DistributedDataParallel.",
            *notes,
            *_notes(comparison, spec),
            "Run it with this command, which restarts failed workers from the last checkpoint:",
            f"    {_command(comparison, str(path))}",
        ]
    )


def script(comparison: Comparison, file: str) -> str:
    """Return the text of the script.

    Args:
        comparison: a comparison with a cell or a built-in task.
        file: the file name of the script.

    Raises:
        UserError: the comparison has no cell, several cells, or a cell that needs a notebook.
    """
    spec = _spec_of(comparison)
    task = parse_task(spec.task).name
    files = [TASKS[task].file] if task != CELL_TASK else []
    files += [FOLDER / f"{each}.py" for each in ("names", "plain", "general")]
    own, texts = _cell(spec), [path.read_text(encoding="utf-8") for path in files]
    *tasks, names, plain, general = map(parse, texts)
    _check(own, names.bound | {each.bound for each in general.imports})
    lines = _settings(comparison, spec, file)
    settings = {name: value for line in lines for name, value in line.items()}
    call = _call(settings, [own, *tasks])
    is_torch = all(each.root in ("torch", *sys.stdlib_module_names) for each in own.imports)
    seed_all = "torch.manual_seed" if call == "main()" and is_torch else "seed_everything"
    seed = parse(f"{seed_all}(SEED)")
    guard = parse(f'if __name__ == "__main__":\n    {call}')
    roots = own.unknown | seed.unknown | guard.unknown
    imports, used, found = needed(roots, [names, *tasks, plain, general], own, settings)
    values = [{name: line[name] for name in line if name in found} for line in lines]
    assigned = [f"{', '.join(v)} = {', '.join(map(_literal, v.values()))}" for v in values if v]
    body = [*parse("\n".join(assigned)).statements]
    for source in (names, seed, own, *tasks, plain, general, guard):
        is_whole = source in (seed, own, guard)
        body += [each for each in source.statements if is_whole or each in used]
    title = f"Train {comparison.name} as in its notebook, with DistributedDataParallel."
    about = "\n".join([_command(comparison, file), *_notes(comparison, spec)])
    head = f'"""{title}\n\n{about}\n"""'
    return "\n\n".join([head, imports_text([*own.imports, *imports]), joined(body)]) + "\n"


def _command(comparison: Comparison, file: str) -> str:
    """Return the command that runs the script.

    If ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE`` is not set, torchrun keeps its store when it restarts
    workers.  New workers would then read the addresses of earlier workers from the store.
    """
    options = f"--standalone --max-restarts 3 --nproc-per-node {_num_ranks(comparison)}"
    return f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun {options} {shlex.quote(file)}"


def _spec_of(comparison: Comparison) -> RunSpec:
    """Return the settings of a ``ddp`` run, or another run's settings changed to ``ddp``.

    Raises:
        UserError: the comparison has no suitable run.
    """
    specs = [run.spec for run in comparison.runs if run.spec] or list(comparison.specs)
    num = len({(spec.task, spec.source) for spec in specs})
    if num != 1:
        raise UserError(
            "ddpnb can export a comparison as a script only if %ddp_compare trained one model, but "
            f"{comparison.name} has {num or 'no'} models."
        )
    specs.sort(key=lambda spec: (spec.repeat, len(spec.strategy)))
    names = [parse_strategy(spec.strategy).name for spec in specs]
    if "ddp" in names:
        return specs[names.index("ddp")]
    built_in = [spec for spec, name in zip(specs, names, strict=True) if name in STRATEGIES]
    if not built_in:
        raise UserError(
            f"An exported script trains with DistributedDataParallel, but {comparison.name} has "
            f"only {names[0]}, a class of your own. Add ddp to the comparison."
        )
    return replace(built_in[0], strategy="ddp")


def _cell(spec: RunSpec) -> Source:
    """Return the statements of the task's cell.  A built-in task has no cell and no statements.

    Raises:
        UserError: a script cannot run the cell.
    """
    cell = body_of(spec.source) if spec.task == CELL_TASK else ""
    if f"from {NOTEBOOK_FUNCTIONS[0]} import" in cell:
        raise UserError(
            "This comparison used functions of the notebook, and ddpnb does not store them. Put "
            "the functions into a cell or a file, and pass it as source= to a new comparison."
        )
    try:
        return parse(cell)
    except SyntaxError as error:
        raise UserError(
            f"Line {error.lineno} of the cell is not plain Python, so a script cannot run it. "
            "Remove magics and shell commands from the cell."
        ) from error


def _check(own: Source, given: set[str]) -> None:
    """Raise a UserError if the cell uses names that other cells define."""
    known = {*dir(builtins), "__name__", "__file__", *given} - {*CELL_NAMES}
    if others := sorted(own.unknown - known):
        raise UserError(
            f"The cell uses {others[0]}, but does not define it. A script contains only this cell. "
            f"Import or define {others[0]} in the cell."
        )


def _settings(comparison: Comparison, spec: RunSpec, file: str) -> list[dict[str, Any]]:
    """Return all settings that can be at the top of a script, as one dict for each line."""
    known, given = STRATEGIES["ddp"].options, parse_strategy(spec.strategy).options
    options = {key: each for key, each in given.items() if each != known[key].default}
    options.pop("hook", None)
    return [
        {
            "EPOCHS": spec.num_epochs,
            "BATCH_SIZE": _batch_size(comparison, spec),
            "SEED": spec.seed,
            "CHECKPOINT": f"{Path(file).stem}.pt",
        },
        {"LEARNING_RATE": spec.learning_rate, "MOMENTUM": spec.momentum},
        {
            "ACCUMULATE": spec.accumulate,
            "AMP": spec.amp != "none",
            "CLIP": math.inf if spec.clip is None else spec.clip,
        },
        {"DATA_WORKERS": spec.num_data_workers},
        {"DDP_OPTIONS": options},
        {name.upper(): each for name, each in parse_task(spec.task).options.items()},
    ]


def _literal(value: Any) -> str:
    """Return a value as Python code, formatted as ruff does it."""
    if value == math.inf:
        return 'float("inf")'
    return json.dumps(value) if isinstance(value, str) else repr(value).replace("'", '"')


def _call(settings: Mapping[str, Any], sources: Sequence[Source]) -> str:
    """Return code that calls either ``main`` of ``plain.py`` or ``run`` of ``general.py``."""
    bound = {name for source in sources for name in source.bound}
    in_parts = settings["ACCUMULATE"] > 1 or settings["AMP"] or settings["CLIP"] < math.inf
    functions = [
        "step_loss" if "training_step" in bound else "pair_loss",
        "own_optimizer" if "optimizer" in bound else "sgd",
        "update_in_parts" if in_parts else "update",
        "held_out_loss",
        *["own_means"] * ("validation_step" in bound),
        *["own_metric"] * ("metric" in bound),
    ]
    is_plain = functions == ["pair_loss", "sgd", "update", "held_out_loss"]
    if settings["DDP_OPTIONS"] or settings["DATA_WORKERS"] or "collate_fn" in bound:
        is_plain = False
    return "main()" if is_plain and all(map(_is_plain, sources)) else f"run({', '.join(functions)})"


def _is_plain(source: Source) -> bool:
    """Return True if ``data`` returns two tensors or arrays, and only torch uses randomness."""
    for each in source.statements:
        for node in ast.walk(ast.parse(each.text)):
            if getattr(node, "id", getattr(node, "attr", "")) == "random":
                return False
            if "data" in each.bound and isinstance(node, ast.Return):
                parts = getattr(node.value, "elts", [])
                if len(parts) != 2 or any(isinstance(e, ast.Dict | ast.Tuple) for e in parts):
                    return False
    return True


def _notes(comparison: Comparison, spec: RunSpec) -> Iterator[str]:
    """Yield a sentence for each difference between the script and the notebook."""
    if spec.strategy not in comparison.strategies:
        yield f"{comparison.name} did not train ddp. The script uses ddp with the same settings."
    missing = [option.flag for field, option in chosen(spec) if field not in CARRIED]
    missing += ["ddp:hook"] * ("hook" in parse_strategy(spec.strategy).options)
    if missing:
        yield f"The script ignores these options of the comparison: {', '.join(missing)}."
    batch_size, used = spec.global_batch(_num_ranks(comparison)), _batch_size(comparison, spec)
    if used != batch_size:
        why = "because each rank must get the same number of samples"
        yield f"The global batch has {used} samples instead of {batch_size}, {why}."


def _batch_size(comparison: Comparison, spec: RunSpec) -> int:
    """Return the global batch size, rounded down to a multiple of the number of ranks."""
    num_ranks = _num_ranks(comparison)
    return spec.global_batch(num_ranks) // num_ranks * num_ranks


def _num_ranks(comparison: Comparison) -> int:
    return max((run.header.num_workers for run in comparison.runs if run.header), default=2)

"""A comparison as a script for torchrun (kernel).

The script needs only torch, and trains with DistributedDataParallel as the notebook did: the same
initial weights, the same samples in the same order, the same steps.  It has the cell or the
built-in task, and of the functions in ``ddpnb/rank/script`` those that its run uses.
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

from ddpnb.history.comparison import Comparison, body_of, chosen
from ddpnb.protocol.catalogue import CELL_TASK, PACKAGE, STRATEGIES, TASKS
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.notation import parse_strategy, parse_task
from ddpnb.protocol.variables import NOTEBOOK_FUNCTIONS
from ddpnb.reports.export.assembly import CELL_NAMES, Source, imports_text, joined, needed, parse

FOLDER = PACKAGE / "rank/script"

CARRIED = {
    *("task", "num_epochs", "min_seconds", "batch_size", "batch_per_worker", "learning_rate"),
    *("momentum", "seed", "accumulate", "amp", "clip", "num_data_workers"),
}
"""Settings that the script has; it names the others that were used."""


def write_script(comparison: Comparison, path: Path) -> str:
    """Write the script, and the images that the task ``digits`` reads.

    Returns:
        What the script has not, and the lines to run it.

    Raises:
        UserError: as ``script`` says.
    """
    notes = [f"The {path} that was there is replaced."] * path.exists()
    checkpoint = Path(f"{path.stem}.pt")
    notes += [f"It goes on from {checkpoint}: delete that to begin anew."] * checkpoint.exists()
    path.write_text(script(comparison, path.name), encoding="utf-8")
    spec = _spec_of(comparison)
    if parse_task(spec.task).name == "digits":  # whose images are in a file
        shutil.copy(TASKS["digits"].file.with_name("digits.npz"), path.parent)
    return "\n".join(
        [
            "a script for torchrun, which trains with DistributedDataParallel.",
            *notes,
            *_notes(comparison, spec),
            "Workers that fail are started again, from the last checkpoint:",
            f"    {_command(comparison, str(path))}",
        ]
    )


def script(comparison: Comparison, file: str) -> str:
    """Return the text of the script.

    Args:
        comparison: has a cell or a built-in task.
        file: the script's name.

    Raises:
        UserError: the comparison has no cell, or several, or one that only a notebook can run.
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
    title = f"Train {comparison.name} as its notebook did, with DistributedDataParallel."
    about = "\n".join([_command(comparison, file), *_notes(comparison, spec)])
    head = f'"""{title}\n\n{about}\n"""'
    return "\n\n".join([head, imports_text([*own.imports, *imports]), joined(body)]) + "\n"


def _command(comparison: Comparison, file: str) -> str:
    """Return the line that runs the script.

    Without the variable torchrun keeps its store when it starts workers again, and these find the
    addresses of those before.
    """
    options = f"--standalone --max-restarts 3 --nproc-per-node {_num_ranks(comparison)}"
    return f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun {options} {shlex.quote(file)}"


def _spec_of(comparison: Comparison) -> RunSpec:
    """Return the run that the script repeats, or a run of ``ddp`` with the settings of another.

    Raises:
        UserError: there is none.
    """
    specs = [run.spec for run in comparison.runs if run.spec] or list(comparison.specs)
    num = len({(spec.task, spec.source) for spec in specs})
    if num != 1:
        raise UserError(
            f"A script trains the model of one %ddp_compare: {comparison.name} has {num or 'none'}."
        )
    specs.sort(key=lambda spec: (spec.repeat, len(spec.strategy)))
    names = [parse_strategy(spec.strategy).name for spec in specs]
    if "ddp" in names:
        return specs[names.index("ddp")]
    built_in = [spec for spec, name in zip(specs, names, strict=True) if name in STRATEGIES]
    if not built_in:
        raise UserError(
            f"A script trains with DistributedDataParallel, and {comparison.name} trained with "
            f"{names[0]}, a class of your own: compare ddp, too."
        )
    return replace(built_in[0], strategy="ddp")


def _cell(spec: RunSpec) -> Source:
    """Return the cell that defines the task; nothing for a built-in task.

    Raises:
        UserError: only a notebook can run it.
    """
    cell = body_of(spec.source) if spec.task == CELL_TASK else ""
    if f"from {NOTEBOOK_FUNCTIONS[0]} import" in cell:
        raise UserError(
            "This comparison trained functions of the notebook, which are not stored: to export a "
            "script, compare with source=, a cell or a file that defines them."
        )
    try:
        return parse(cell)
    except SyntaxError as error:
        raise UserError(
            f"Line {error.lineno} of the cell is not plain Python: only a notebook can run it."
        ) from error


def _check(own: Source, given: set[str]) -> None:
    """Refuse a cell that uses names of other cells."""
    known = {*dir(builtins), "__name__", "__file__", *given} - {*CELL_NAMES}
    if others := sorted(own.unknown - known):
        raise UserError(
            f"The cell uses {others[0]}, which it does not define, and a script has nothing of "
            "other cells: import or define it in the cell."
        )


def _settings(comparison: Comparison, spec: RunSpec, file: str) -> list[dict[str, Any]]:
    """Return the values at the top of the script, line by line; it gets those that it uses."""
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
    """Return a value as ruff writes it."""
    if value == math.inf:
        return 'float("inf")'
    return json.dumps(value) if isinstance(value, str) else repr(value).replace("'", '"')


def _call(settings: Mapping[str, Any], sources: Sequence[Source]) -> str:
    """Return the call that trains: of ``plain.py`` where that does, else of ``general.py``."""
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
    """Return whether ``data`` returns two tensors or arrays, and all draws are torch's."""
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
    """Yield a sentence for everything in which the script differs from the notebook."""
    if spec.strategy not in comparison.strategies:
        yield f"{comparison.name} did not train ddp; the settings are its own."
    missing = [option.flag for field, option in chosen(spec) if field not in CARRIED]
    missing += ["ddp:hook"] * ("hook" in parse_strategy(spec.strategy).options)
    if missing:
        yield f"The comparison also used {', '.join(missing)}: this script does not."
    batch_size, used = spec.global_batch(_num_ranks(comparison)), _batch_size(comparison, spec)
    if used != batch_size:
        yield f"The batch has {used} samples, as many for each rank, where it had {batch_size}."


def _batch_size(comparison: Comparison, spec: RunSpec) -> int:
    """Return the samples of each step, as many for each rank."""
    num_ranks = _num_ranks(comparison)
    return spec.global_batch(num_ranks) // num_ranks * num_ranks


def _num_ranks(comparison: Comparison) -> int:
    return max((run.header.num_workers for run in comparison.runs if run.header), default=2)

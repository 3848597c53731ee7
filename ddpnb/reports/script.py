"""The cell of a comparison as a script for torchrun (kernel).

The script needs only torch and trains as the strategy did: the same initial weights, the same
samples in the same order, the same steps.
"""

import ast
import builtins
import json
import re
import shlex
import shutil
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from string import Template

from ddpnb.history.comparison import Comparison, body_of, chosen
from ddpnb.protocol.catalogue import CELL_TASK, STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.notation import parse_strategy
from ddpnb.protocol.options import Value
from ddpnb.protocol.variables import NOTEBOOK_FUNCTIONS
from ddpnb.reports.script_text import BEGINNING, IMPORTS
from ddpnb.reports.script_training import TRAINING

CARRIED = {
    *("task", "num_epochs", "min_seconds", "batch_size", "batch_per_worker", "learning_rate"),
    *("momentum", "seed", "accumulate", "amp", "clip", "num_data_workers"),
}
"""Settings that the script has; its docstring names the others that were used."""

EXPORTED = {
    "ddp": "torch's DistributedDataParallel",
    "zero": "DistributedDataParallel and ZeroRedundancyOptimizer",
    "fsdp": "torch's fully_shard (FSDP2)",
    "local-sgd": "local SGD, which averages weights",
}
"""What can be written in a few lines of plain torch, and how its docstring says it."""

_OWN_EXCHANGE = (
    "exchanges what ddp does in a way of ddpnb's own: take ddp, its updates are the same"
)
_OWN_SERVER = "needs ddpnb's own server and memory shared by its ranks"
REFUSED = {
    "single": "is one process: take ddp, and start it with --nproc-per-node 1",
    "dp": "is one process with threads, which torchrun does not start: take ddp",
    "ddp-shm": _OWN_EXCHANGE,
    "ddp-by-hand": _OWN_EXCHANGE,
    "ddp-overlap-by-hand": _OWN_EXCHANGE,
    "ring-by-hand": _OWN_EXCHANGE,
    "central": _OWN_EXCHANGE,
    "async": _OWN_SERVER,
    "hogwild": _OWN_SERVER,
    "diloco": "has an outer optimizer of ddpnb's own: take local-sgd, which is it without one",
    "gossip": "needs ddpnb's own exchange with one neighbour: take local-sgd",
    "no-comm": "exchanges nothing, so there is no one model to train: take ddp",
}
"""Why the others cannot."""

WRAPPED = {
    "bucket_cap_mb": "bucket_cap_mb",
    "find_unused_parameters": "find_unused_parameters",
}
"""Options of ``ddp`` that are arguments of ``DistributedDataParallel``, and their names there."""

ALWAYS = frozenset({"ddp"})
"""The tags of the imports that a cell may count on."""

FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""Without it torchrun keeps its store from one start of the workers to the next, and these find the
addresses of those before."""

RANK_NAMES = {
    "rank": 'int(os.environ["RANK"])',
    "local_rank": 'int(os.environ["LOCAL_RANK"])',
    "world_size": 'int(os.environ["WORLD_SIZE"])',
    "device": 'torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")',
}
"""What every rank's namespace holds, for a cell that uses it."""

SBATCH = Template("""\
#!/bin/bash
# $num_ranks processes in all, shared by the nodes:  sbatch $file   or   sbatch --nodes 2 $file
#SBATCH --job-name=$name
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.out
#SBATCH --time=01:00:00
#SBATCH --requeue$gpus

if (( $num_ranks % SLURM_JOB_NUM_NODES )); then
    echo "$num_ranks processes cannot be shared evenly by $$SLURM_JOB_NUM_NODES nodes." >&2
    exit 1
fi
head=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | head -n 1)
# Workers that are started again must not find the old addresses.
export $store
# A job that was requeued goes on from its checkpoint, in a folder that all nodes share.
srun torchrun \\
    --nnodes "$$SLURM_JOB_NUM_NODES" --nproc-per-node "$$(( $num_ranks / SLURM_JOB_NUM_NODES ))" \\
    --rdzv-id "$$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$$head:29400" \\
    --max-restarts 3 $script --resume
""")


def write_script(
    comparison: Comparison, path: Path, strategy: str = "", sbatch: bool = False
) -> str:
    """Write the script, and if asked for a job file for Slurm beside it.

    Args:
        comparison: has a cell.
        path: the file.
        strategy: which one to write; empty: ddp if it was compared.
        sbatch: whether to write the job file.

    Returns:
        Which strategy it has, what it has not, and the lines to run it.

    Raises:
        UserError: as ``script`` says.
    """
    spec = _spec_of(comparison, strategy)
    notes = list(_notes(comparison, spec))
    if path.exists():
        notes.insert(0, f"The {path} that was there is replaced.")
    path.write_text(script(comparison, path.name, strategy), encoding="utf-8")
    lines = [f"trains with {EXPORTED[parse_strategy(spec.strategy).name]}.", *notes]
    if sbatch:
        job, num_ranks = path.with_suffix(".sbatch"), num_ranks_of(comparison)
        on_gpu = comparison.environment.get("GPUs", "none") != "none"
        gpus = f"\n#SBATCH --gpus={num_ranks}" if on_gpu else ""
        job.write_text(
            SBATCH.substitute(
                name=_id_of(comparison),
                num_ranks=num_ranks,
                file=shlex.quote(job.name),
                script=shlex.quote(path.name),
                gpus=gpus,
                store=FRESH_STORE,
            ),
            encoding="utf-8",
        )
        lines.append(f"{job}: a job for Slurm; start it with  sbatch {shlex.quote(job.name)}")
    lines.append(commands(comparison, str(path)))
    if shutil.which("torchrun") is None:  # as where JupyterLab was called by its path
        instead = f"{shlex.quote(sys.executable)} -m torch.distributed.run"
        lines.append(f"There is no torchrun on this PATH: write  {instead}  in its place.")
    return "\n".join(lines)


def commands(comparison: Comparison, file: str) -> str:
    """Return the lines that run the script, with a heading each."""
    num, name = num_ranks_of(comparison), _id_of(comparison)
    of_other = max(1, num // 2)
    of_host = max(1, num - of_other)
    uneven = f" (--nproc-per-node {of_other} on the other)" if of_other != of_host else ""
    quoted = shlex.quote(file)
    again = "--max-restarts 3"
    meeting = f"--rdzv-id {name} --rdzv-backend c10d --rdzv-endpoint HOST:29400"
    return f"""\
On one machine:
    torchrun --standalone --nproc-per-node {num} {quoted}
The same; workers that fail are started again, and all go on from the last checkpoint:
    torchrun --standalone {again} --nproc-per-node {num} {quoted}
On each of two machines, of which HOST is one{uneven}; --checkpoint in a folder that both see:
    export {FRESH_STORE}  # or workers started again find old addresses
    torchrun --nnodes 2 {again} --nproc-per-node {of_host} {meeting} {quoted}
Where a machine's own name does not lead to its address (often to 127.0.1.1), also name on each
the interface, and after torchrun --local-addr ADDRESS, on HOST --rdzv-conf is_host=1 too:
    export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
Where there is no torchrun:
    python -m torch.distributed.launch --use-env --nproc-per-node {num} {quoted}"""


def script(comparison: Comparison, file: str, strategy: str = "") -> str:
    """Return the text of the script.

    Args:
        comparison: has a cell.
        file: the script's name.
        strategy: which one to write; empty: ddp if it was compared.

    Raises:
        UserError: the comparison has no cell, or several, or one that only a notebook can run, or
            its strategy is not a few lines of plain torch.
    """
    spec = _spec_of(comparison, strategy)
    choice, options = parse_strategy(spec.strategy), _options(spec)
    cell = body_of(spec.source).strip()
    if f"from {NOTEBOOK_FUNCTIONS[0]} import" in cell:
        raise UserError(
            "This comparison trained functions of the notebook, which are not stored: to export a "
            "script, compare with source=, a cell or a file that defines them."
        )
    try:
        unknown, bound = _names(cell)
    except SyntaxError as error:
        raise UserError(
            f"Line {error.lineno} of the cell is not plain Python: only a notebook can run it."
        ) from error
    if others := sorted(unknown - RANK_NAMES.keys()):
        raise UserError(
            f"The cell uses {others[0]}, which it does not define, and a script has nothing of "
            "other cells: import or define it in the cell."
        )
    tags = _tags(spec, bound)
    imports = kept(IMPORTS, tags).rstrip()
    text = kept(BEGINNING, tags) + "\n\n" + kept(TRAINING, tags)
    imported = _imported(ast.parse(imports))
    needed = {name for name in imported if bound.get(name, imported[name]) != imported[name]}
    if others := sorted(needed | (bound.keys() & _defined_in(text))):
        raise UserError(
            f"The cell defines {others[0]}, which the script needs for something else: give it "
            "another name in the cell."
        )
    wrapped = {WRAPPED[name]: value for name, value in options.items() if name in WRAPPED}
    notes = "".join(f"\n{note}\n" for note in _notes(comparison, spec))
    return Template(text).substitute(
        name=comparison.name,
        about=f"{spec.strategy}, with {EXPORTED[choice.name]}",
        commands=commands(comparison, file),
        notes=notes,
        imports=imports,
        num_epochs=repr(spec.num_epochs),
        batch_size=repr(_batch_size(comparison, spec)),
        learning_rate=repr(spec.learning_rate),
        momentum=repr(spec.momentum),
        seed=repr(spec.seed),
        accumulate=repr(spec.accumulate),
        clip=repr(spec.clip),
        every=repr(options.get("every", 8)),
        reshard=repr(options.get("reshard", True)),
        num_data_workers=repr(spec.num_data_workers),
        save_every="1.0",
        checkpoint=json.dumps(f"{Path(file).stem}.pt"),
        cell=cell,
        collate="collate_fn" if "collate_fn" in bound else "None",
        loss="loss" if "loss" in bound else "nn.functional.cross_entropy",
        wrapped="".join(f", {name}={value!r}" for name, value in wrapped.items()),
        rank_names="".join(
            f"{name} = {value}\n"
            for name, value in RANK_NAMES.items()
            if name in unknown or (name == "local_rank" and "device" in unknown)
        ),
    )


def kept(text: str, tags: Set[str]) -> str:
    """Return the lines of a template whose tags hold, without the tags; see ``script_text``."""
    lines, is_in = [], True
    for line in text.splitlines():
        code, mark, wanted = line.partition("#?")
        names = wanted.split()
        holds = any(name in tags or (name[0] == "!" and name[1:] not in tags) for name in names)
        if names == ["}"]:
            is_in = True
        elif names[-1:] == ["{"]:
            is_in = holds
        elif is_in and (not mark or holds):
            lines.append(code.rstrip())
    return "\n".join(lines) + "\n"


def num_ranks_of(comparison: Comparison) -> int:
    """Return how many ranks the script is for."""
    return max((run.header.num_workers for run in comparison.runs if run.header), default=2)


def _spec_of(comparison: Comparison, strategy: str) -> RunSpec:
    """Return the run that the script repeats.

    Raises:
        UserError: there is none.
    """
    specs = [run.spec for run in comparison.runs if run.spec] or list(comparison.specs)
    sources = dict.fromkeys(spec.source for spec in specs if spec.task == CELL_TASK)
    if not sources and specs:
        raise UserError(
            f"{comparison.name} trains the built-in task {specs[0].task}, which is no script: a "
            "script is made of the cell of a %%ddp_compare, with its model() and data(split)."
        )
    if len(sources) != 1:
        raise UserError(
            "A script is made of the cell of one %%ddp_compare: "
            f"{comparison.name} has {len(sources) or 'no'} such cell{'s' * (len(sources) > 1)}."
        )
    specs = sorted(
        (spec for spec in specs if spec.task == CELL_TASK),
        key=lambda spec: (spec.repeat, len(spec.strategy)),
    )
    if strategy:
        name = parse_strategy(strategy).name
        if name not in EXPORTED:
            raise _refused(name)
        same = [spec for spec in specs if spec.strategy == strategy]
        alike = [spec for spec in specs if parse_strategy(spec.strategy).name == strategy]
        return (same or alike or [replace(_built_in(comparison, specs), strategy=strategy)])[0]
    _built_in(comparison, specs)
    for name in EXPORTED:
        for spec in specs:
            if parse_strategy(spec.strategy).name == name:
                return spec
    raise _refused(parse_strategy(_built_in(comparison, specs).strategy).name)


def _built_in(comparison: Comparison, specs: Sequence[RunSpec]) -> RunSpec:
    """Return the run with the settings of a strategy that was not compared."""
    for spec in specs:
        if parse_strategy(spec.strategy).name in STRATEGIES:
            return spec
    raise UserError(
        f"A script trains with DistributedDataParallel, and {comparison.name} trained with "
        f"{parse_strategy(specs[0].strategy).name}, a class of your own: compare ddp, too."
    )


def _refused(name: str) -> UserError:
    why = REFUSED.get(name, "is a class of your own, which runs in ddpnb: take ddp")
    return UserError(f"{name} cannot be a script: it {why} (--strategy).")


def _options(spec: RunSpec) -> dict[str, Value]:
    """Return the options of the strategy that differ from its defaults."""
    choice = parse_strategy(spec.strategy)
    known = STRATEGIES[choice.name].options
    given = choice.options.items()
    return {name: value for name, value in given if value != known[name].default}


def _tags(spec: RunSpec, bound: Mapping[str, str]) -> set[str]:
    """Return what holds of a run: see ``script_text``."""
    name, options = parse_strategy(spec.strategy).name, _options(spec)
    short = {"local-sgd": "local"}.get(name, name)
    defined = {
        "optimizer": "optimizer",
        "training_step": "step",
        "validation_step": "validation",
        "metric": "metric",
    }
    used = {
        "accumulate": spec.accumulate > 1,
        "amp": spec.amp != "none",
        "clip": spec.clip is not None,
    }
    tags = {short} | {tag for name, tag in defined.items() if name in bound}
    tags |= {tag for tag, is_used in used.items() if is_used}
    return tags | {str(options["hook"])} if "hook" in options else tags


def _notes(comparison: Comparison, spec: RunSpec) -> Iterator[str]:
    """Yield a sentence for everything in which the script differs from the notebook."""
    compared = [run.spec.strategy for run in comparison.runs if run.spec]
    compared += [each.strategy for each in comparison.specs]
    if spec.strategy not in compared:
        yield f"{comparison.name} did not train {spec.strategy}; the settings are its own."
    name, num_ranks = parse_strategy(spec.strategy).name, num_ranks_of(comparison)
    if missing := [option.flag for field, option in chosen(spec) if field not in CARRIED]:
        yield f"The comparison also used {', '.join(missing)}: this script does not."
    batch_size, used = spec.global_batch(num_ranks), _batch_size(comparison, spec)
    if used != batch_size:
        yield (
            f"The comparison's batch of {batch_size} is not a multiple of its {num_ranks} ranks, "
            f"and DistributedSampler gives all as many: the script's is {used}, and its losses "
            "differ."
        )
    if name == "local-sgd":
        yield (
            "Where the model has BatchNorm, its final losses differ: the notebook estimates the "
            "statistics of averaged weights anew, and this script takes rank 0's."
        )


def _batch_size(comparison: Comparison, spec: RunSpec) -> int:
    """Return the samples of each step, as many for each rank."""
    num_ranks = num_ranks_of(comparison)
    return spec.global_batch(num_ranks) // num_ranks * num_ranks


def _id_of(comparison: Comparison) -> str:
    """Return the comparison's name as one plain word of a command."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", comparison.name).strip("-") or "train"


def _names(cell: str) -> tuple[set[str], dict[str, str]]:
    """Return the names that only other cells can define, and those that this one does.

    The latter are with what is imported there, or nothing.

    Raises:
        SyntaxError: it is not Python.
        UserError: it imports ``*``.
    """
    tree = ast.parse(cell)
    used: set[str] = set()
    bound: set[str] = set()
    tables = [symtable.symtable(cell, "cell", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_global = symbol.is_global() or table.get_type() == "module"
            if is_global and (symbol.is_assigned() or symbol.is_imported()):
                bound.add(symbol.get_name())
            elif is_global and symbol.is_referenced():
                used.add(symbol.get_name())
    imported = _imported(tree)
    if "*" in imported:
        raise UserError(
            f"The cell imports * from {imported['*'].removesuffix('.*')}, and a script must know "
            "what it has: import the names that it uses."
        )
    given = {"__name__", "__file__", *dir(builtins), *_imported(ast.parse(kept(IMPORTS, ALWAYS)))}
    return used - bound - given, {name: imported.get(name, "") for name in bound}


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return the names that are imported, and what each is: ``{"nn": "torch.nn"}``."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]
                found[each.asname or first] = each.name if each.asname else first
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                found[each.asname or each.name] = f"{node.module}.{each.name}"
    return found


def _defined_in(text: str) -> set[str]:
    """Return the names that the script itself defines."""
    return set(re.findall(r"^(?:def |class )?(\w+)(?: = |\(|:)", text, re.MULTILINE))

"""What may the notebook ask of a rank?  (Rank side.)

Each function here is called by its name, through ``ddpnb.wire.OnRank``.
"""

from collections.abc import Mapping
from dataclasses import replace

from ddpnb.rank import cell, worker
from ddpnb.rank.engine import RankEngine
from ddpnb.rank.publish import Publisher
from ddpnb.wire import CellReport, CellSpec, Failure, RankState, RunReport, RunSpec


def state() -> RankState:
    """Describe where this rank lives."""
    return this_engine().group.state()


def rejoin(generation: int) -> None:
    """Form a new process group; takes part: every rank."""
    this_engine().group.join(generation)


def run_cell(spec: CellSpec) -> CellReport:
    """Run a notebook cell."""
    return cell.run_cell(spec, this_engine())


def check(spec: RunSpec) -> Failure | None:
    """Find what would stop a training, before anything trains."""
    engine = this_engine()
    try:
        worker.check(spec, state=engine.group.state(), namespace=engine.kernel.shell.user_ns)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  told in the notebook
        return cell.failure_of(error, engine)
    return None


def train(spec: RunSpec) -> RunReport | Failure:
    """Train as the spec says; report how it went."""
    engine = this_engine()
    group = engine.group
    try:
        with Publisher(rank=group.rank, run_id=spec.run_id) as publisher:
            report = worker.run(
                spec,
                state=group.state(),
                folder=group.folder,
                publish=publisher.publish,
                namespace=engine.kernel.shell.user_ns,
                should_stop=lambda: False,  # a run is stopped from outside, by interrupt and cut
            )
        return replace(report, num_batches_sent=publisher.num_batches)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  told in the notebook
        return cell.failure_of(error, engine)


def push(variables: Mapping[str, object]) -> None:
    """Put variables into this rank's namespace."""
    this_engine().kernel.shell.push(dict(variables))


def pull(expression: str) -> object:
    """Return the value of an expression in this rank's namespace, or how it failed."""
    engine = this_engine()
    try:
        return eval(expression, engine.kernel.shell.user_ns)
    except Exception as error:  # noqa: BLE001  told in the notebook
        return cell.failure_of(error, engine)


def this_engine() -> RankEngine:
    """Return the engine that this process is."""
    engine = RankEngine.instance()
    assert isinstance(engine, RankEngine)
    return engine

import psutil

from tests.cluster.rig import is_alive, pull, run, started


def test_the_controller_keeps_nothing_of_what_passes_through_it():
    with started(2) as cluster:
        ranks = {state.pid for state in cluster.states}
        children = psutil.Process(cluster.processes.pid).children()
        (controller,) = (p for p in children if p.pid not in ranks and is_alive(p))
        run(cluster, "import torch; big = torch.ones(5_000_000)")
        for _ in range(12):
            assert len(pull(cluster, "big.numpy()")) == 2  # 40 MB
        assert controller.memory_info().rss < 300e6  # of 480 MB

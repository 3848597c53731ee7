"""One thread sends the events of all threads."""

import threading

from ddpnb.protocol.messages import Mark
from ddpnb.rank.publisher import Publisher

NUM_THREADS, NUM_ROUNDS = 8, 100


class Counting(Publisher):
    """Counts its sending threads and sends nothing."""

    def __init__(self) -> None:
        super().__init__(rank=0, run_id="run")
        self.started: list[str] = []

    def _run(self) -> None:
        self.started.append(threading.current_thread().name)


def test_first_events_of_several_threads_start_one_thread():
    for _ in range(NUM_ROUNDS):
        publisher = Counting()
        gate = threading.Barrier(NUM_THREADS)

        def first(publisher: Publisher = publisher, gate: threading.Barrier = gate) -> None:
            gate.wait(10)
            publisher.publish(Mark(rank=0, seconds=0.0, text="began"))

        threads = [threading.Thread(target=first) for _ in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert publisher._thread is not None
        publisher._thread.join(10)
        assert publisher.started == ["ddpnb-publish"]

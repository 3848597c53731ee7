"""One thread sends the events of all threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

from ddpnb.protocol.messages import Mark
from ddpnb.rank.publisher import Publisher

NUM_THREADS, NUM_ROUNDS = 8, 100


class Counting(Publisher):
    """Counts its sending threads and sends nothing."""

    num_started = 0

    def _run(self) -> None:
        self.num_started += 1


def test_first_events_of_several_threads_start_one_thread():
    gate = threading.Barrier(NUM_THREADS, timeout=10)

    def publish(publisher: Publisher) -> None:
        gate.wait()
        publisher.publish(Mark(rank=0, seconds=0.0, text="began"))

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for _ in range(NUM_ROUNDS):
            publisher = Counting(rank=0, run_id="run")
            list(pool.map(publish, [publisher] * NUM_THREADS))
            assert publisher._thread is not None
            publisher._thread.join(10)
            assert publisher.num_started == 1

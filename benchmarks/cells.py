"""What does a cell cost?  ``%%ddp`` against ipyparallel's ``%%px``, in the same kernel."""

import textwrap

from benchmarks.kernel import kernel
from benchmarks.measure import Figure

SETUP = textwrap.dedent(
    """
    import json, time
    import ipyparallel as ipp
    from IPython import get_ipython
    get_ipython().run_line_magic("load_ext", "ddpnb")
    get_ipython().run_line_magic("ddp_start", "-n 2")
    other = ipp.Cluster(n=2, log_level=40)
    client = other.start_and_connect_sync()
    client.activate()

    def timed(magic, source, quiet=True):
        began = time.perf_counter()
        get_ipython().run_cell_magic(magic, "", source)
        return time.perf_counter() - began
    """
)

EMPTY = textwrap.dedent(
    """
    pairs = [(timed("ddp", "pass"), timed("px", "pass")) for _ in range(60)][10:]
    print(json.dumps([[1e3 * a for a, b in pairs], [1e3 * b for a, b in pairs]]))
    """
)

PRINTED = textwrap.dedent(
    """
    source = {source!r}
    pairs = [(timed("ddp", source), timed("px", source)) for _ in range(12)][1:]
    print()
    print(json.dumps([[a for a, b in pairs], [b for a, b in pairs]]))
    """
)

EQUAL = "for i in range(20000): print(f'{i:06d} ' + 'x' * 73)"
DIFFERENT = "import os\nfor i in range(20000): print(f'{i:06d} {os.getpid()} '.ljust(80, 'x'))"

STOP = """
get_ipython().run_line_magic("ddp_stop", "")
client.close()
other.stop_cluster_sync()
"""


def measure() -> list[Figure]:
    with kernel() as running:
        running.run(SETUP)
        empty = running.value(EMPTY)
        equal = running.value(PRINTED.format(source=EQUAL))
        different = running.value(PRINTED.format(source=DIFFERENT))
        running.run(STOP)
    return [
        Figure(
            name="an empty %%ddp cell at 2 ranks against %%px",
            unit="ms",
            ours=empty[0],
            theirs=empty[1],
            limit="<= 1.0",
        ),
        Figure(
            name="1.6 MB printed by each of 2 ranks against %%px",
            unit="s",
            ours=equal[0],
            theirs=equal[1],
            limit="<= 1.2",
        ),
        Figure(
            name="the same, all lines of the two ranks different",
            unit="s",
            ours=different[0],
            theirs=different[1],
            limit="<= 1.2",
        ),
    ]

"""Which hosts does a cluster start on?  (kernel)"""

from collections.abc import Callable

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.placement import ClusterSpec
from ddpnb.cluster.processes import LocalProcesses, StartProcesses
from ddpnb.hosts.processes import HostProcesses
from ddpnb.hosts.spec import HostsSpec


def start_cluster(spec: ClusterSpec, progress: Callable[[str], None] = lambda _: None) -> Cluster:
    """Start ranks on this host, or on those that the spec names; see ``Cluster.start``."""
    is_remote = isinstance(spec, HostsSpec) and spec.is_remote
    start_processes: StartProcesses = HostProcesses if is_remote else LocalProcesses
    return Cluster.start(spec, progress, start_processes)

"""The work queue and the parameter server of asynchronous strategies (ranks)."""

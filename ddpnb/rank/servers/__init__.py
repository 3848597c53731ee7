"""The work queue and the parameter server of asynchronous strategies.  Runs on the ranks."""

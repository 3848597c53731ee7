"""Pictures and texts about single steps, samples and replicas.  Runs in the kernel."""

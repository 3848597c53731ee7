"""Pictures and texts about single steps, samples and replicas, from recorded data (kernel)."""

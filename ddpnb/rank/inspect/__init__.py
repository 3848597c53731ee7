"""Inspections of a rank: its steps, its replicas, its samples and its collectives (ranks)."""

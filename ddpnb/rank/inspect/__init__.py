"""Inspections of a rank's steps, replicas, samples and collectives (ranks)."""

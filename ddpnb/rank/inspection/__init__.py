"""Inspections of a rank's steps, replicas, samples and collectives.  Runs on the ranks."""

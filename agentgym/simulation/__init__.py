"""Simulated workers, policy servers and trainers around the real coordinator, in virtual time."""

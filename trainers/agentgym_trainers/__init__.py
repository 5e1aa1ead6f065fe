"""Trainers for agentgym."""

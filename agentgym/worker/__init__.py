"""Who plays: the environment worker and one rollout."""

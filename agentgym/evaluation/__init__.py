"""`agentgym eval`: policies played on fixed tasks, recorded and summed up."""

"""The environments that ship with agentgym."""

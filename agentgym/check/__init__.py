"""`agentgym check`: does an environment keep its promises? Rules, each a name and one sentence."""

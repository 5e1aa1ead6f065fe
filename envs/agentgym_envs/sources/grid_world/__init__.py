"""Views of Minigrid and BabyAI: the mission and what is in front of the agent, in words; a scripted seeker.

Rewards are Minigrid's: 1 minus 0.9 of the share of the steps used, when the mission is done. Success: done.
"""

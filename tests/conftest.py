from hypothesis import settings

# Machines are busy at times: how long an example takes says nothing about what is tested.
settings.register_profile("agentgym", deadline=None, max_examples=50)
settings.load_profile("agentgym")

"""The errors of agentgym, one class per boundary a failure can cross.

    AgentGymError
    ├── ConfigError      a setting, a file or a command line is wrong; nothing was started
    ├── ModelError       a model folder is missing, incomplete or of an unsupported architecture
    ├── EnvError         an environment raised, or broke its contract; the episode fails, the run goes on
    │   ├── EnvTimeoutError  an environment call did not return in time
    │   └── DivergedError    an environment did not do the same again
    ├── PolicyError      a policy server did not answer, or answered with an error
    │   └── PolicyUnavailableError  no server is there to ask; asking again later may help
    ├── WireError        a message that could not be decoded
    ├── IntegrityError   a trajectory is not what its worker recorded
    └── RunError         a process of the run failed in a way that ends the run
        └── StoppedError     its user wanted it to end at once

An environment's author raises ordinary Python exceptions; `worker.rollout` turns them into EnvError with
the cause chained. Every message says what was wrong, what was found and what to do about it.
"""


class AgentGymError(Exception):
    """The base of every error that agentgym raises on purpose."""


class ConfigError(AgentGymError, ValueError):
    """A setting, a file or a command line is wrong; nothing was started."""


class ModelError(AgentGymError, ValueError):
    """A model folder is missing, incomplete or of an architecture that is not supported."""


class EnvError(AgentGymError, RuntimeError):
    """An environment raised or broke its contract; the episode fails and the run goes on."""


class EnvTimeoutError(EnvError, TimeoutError):
    """An environment call did not return within its limit."""


class DivergedError(EnvError):
    """An environment did not do the same again, given the same seed and the same answers."""


class PolicyError(AgentGymError, RuntimeError):
    """A policy did not answer, or answered with an error."""


class PolicyUnavailableError(PolicyError):
    """No policy server is there to ask, or it went away; asking again later may help."""


class WireError(AgentGymError, ValueError):
    """A message that could not be decoded; the receiver counts it and goes on."""


class IntegrityError(AgentGymError, ValueError):
    """A trajectory that is not what its worker recorded."""


class RunError(AgentGymError, RuntimeError):
    """A process of the run failed in a way that ends the run."""


class StoppedError(RunError):
    """The run ended at once because its user asked for it, twice."""

"""Sets of tools to put into `ToolEnv.toolsets`."""

from agentgym.toolsets.calculator import Calculator

__all__ = ["Calculator"]

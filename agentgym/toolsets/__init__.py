"""Sets of tools to put into `ToolEnv.toolsets`: arithmetic, Python in a sandbox, SQL, and MCP servers."""

from agentgym.toolsets.calculator import Calculator
from agentgym.toolsets.mcp import MCPToolset
from agentgym.toolsets.python import Python
from agentgym.toolsets.sql import Sql

__all__ = ["Calculator", "MCPToolset", "Python", "Sql"]

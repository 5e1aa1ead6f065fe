"""Libraries that may not be installed."""

import importlib.util


def need(module: str) -> None:
    """Raise ModuleNotFoundError where a top-level module is not installed; nothing is imported."""
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

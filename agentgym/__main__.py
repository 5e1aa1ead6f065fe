"""`python -m agentgym`: the command line."""

from agentgym.cli import main

if __name__ == "__main__":
    main()

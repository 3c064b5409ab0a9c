"""``python -m hetdpt``: the command line."""

from hetdpt.cli import main

main()

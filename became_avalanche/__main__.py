"""Run the command ``became``: ``python -m became_avalanche``."""

from became_avalanche.cli import main

main()

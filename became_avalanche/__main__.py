"""``python -m became_avalanche`` is the command ``became``."""

from became_avalanche.cli import main

main()

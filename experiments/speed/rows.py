"""A row of the table of speed."""

from dataclasses import dataclass


@dataclass
class Row:
    """One measurement and its goal."""

    what: str
    """What is measured, in words."""
    value: float
    """What was measured, most often a ratio of CPU times."""
    goal: str
    """The goal in words, such as ``<= 1.05``."""
    met: bool
    """Whether the value meets the goal."""
    note: str
    """How it was measured, or what bounds it."""

"""Gradient projection and Bayesian model merging (BECAME) as Avalanche plugins.

``__init__.pyi`` lists the public names. Each is imported when it is first used: torch and Avalanche take seconds to
import, and ``became --help`` needs neither.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

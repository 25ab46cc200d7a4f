"""Avalanche 0.6.0: WandBLogger cannot be constructed with current wandb.

It calls ``wandb.util.generate_id``, which wandb has moved, and ``wandb.run._label``, which wandb has removed.
"""

import tempfile

from avalanche.logging import WandBLogger

try:
    WandBLogger(project_name="demo", params={"mode": "disabled"}, dir=tempfile.gettempdir())
except Exception as error:
    print(f"{type(error).__name__}: {error}")
    print("fault shown")
else:
    print("no fault")

# Fix, in WandBLogger.before_run: let wandb choose the id, and drop the label.
#     self.wandb.init(**self.init_kwargs)

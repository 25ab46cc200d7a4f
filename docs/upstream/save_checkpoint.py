"""Avalanche 0.6.0: save_checkpoint fails for every torch optimizer with current torch and dill.

``torch.optim`` deletes its submodules from its own namespace. dill then cannot find the module of the optimizer's
class by name, pickles the class itself with everything that it refers to, and fails.
"""

import io

import torch
from avalanche.checkpointing import save_checkpoint
from avalanche.models import SimpleMLP
from avalanche.training.supervised import Naive

model = SimpleMLP(num_classes=2, input_size=4)
strategy = Naive(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), evaluator=None)
try:
    save_checkpoint(strategy, io.BytesIO())
except Exception as error:
    print(f"{type(error).__name__}: {error}")
    print("fault shown")
else:
    print("no fault")

# Fix, before pickling: give torch.optim its submodules back.
#     for name, module in list(sys.modules.items()):
#         if name.startswith("torch.optim.") and name.count(".") == 2:
#             setattr(torch.optim, name.rpartition(".")[2], module)

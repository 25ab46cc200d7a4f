import os

import pytest
import torch
from hypothesis import Phase, settings

settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
settings.register_profile(
    "first failure", parent=settings.get_profile("default"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("default")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def fresh_wandb(tmp_path, monkeypatch):
    """A wandb that reads its environment anew, with neither login nor files of the user."""
    import wandb

    wandb.teardown()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for place in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{place}_DIR", str(tmp_path / place))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    yield
    wandb.teardown()

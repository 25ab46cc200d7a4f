import gc
import os
from pathlib import Path

import pytest
from hypothesis import Phase, settings

settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
settings.register_profile(
    "first failure", parent=settings.get_profile("default"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("default")


def pytest_collection_finish():
    """Use one thread, and exclude what the imports have made from every later garbage collection.

    torch is imported here and not above, because the process that distributes the tests does not need it.
    """
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    gc.enable()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)


@pytest.fixture
def unrendered(monkeypatch):
    """Figures are drawn, but their files are empty: rendering takes most of the time of a small comparison.

    Returns the set of names of files, without suffix, that are rendered nevertheless; it is empty at first.
    """
    from matplotlib.figure import Figure

    render, rendered = Figure.savefig, set()

    def savefig(self, file, **options):
        if isinstance(file, str | os.PathLike):
            if Path(file).stem in rendered:
                render(self, file, **options)
            else:
                Path(file).write_bytes(b"")

    monkeypatch.setattr(Figure, "savefig", savefig)
    return rendered


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

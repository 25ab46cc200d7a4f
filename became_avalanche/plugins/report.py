"""What a projection plugin does to a model, for people to read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProjectionReport:
    """What a projection plugin does to the trainable parameters of a model in the next experience."""

    plugin: str
    """Name of its class."""
    experiences: int
    """Experiences in memory."""
    bases: dict[str, tuple[int, int]]
    """Protected weight -> in how many input directions updates are reduced, of how many."""
    frozen: list[str]
    """Parameters that do not train: biases of protected layers, and normalisation parameters."""
    free: list[str]
    """Parameters that train freely: heads of single tasks, excluded modules, what cannot be protected or is new."""
    memory_bytes: int
    """Bytes of all tensors that the plugin holds."""

    def __str__(self) -> str:
        head = f"{self.plugin} after {self.experiences} experience{'' if self.experiences == 1 else 's'}"
        width = max(map(len, self.bases), default=0)
        lines = [f"{head}, {self.memory_bytes / 2**20:.2f} MiB"]
        lines += [f"  protected  {name:{width}}  {rank} of {of} directions" for name, (rank, of) in self.bases.items()]
        for what, names in (("frozen", self.frozen), ("free", self.free)):
            lines += [f"  {what:9}  {name}" for name in names]
        return "\n".join(lines)

"""A readable summary of what a projection plugin does to a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProjectionReport:
    """Says which trainable parameters a projection plugin protects, freezes and leaves free in the next experience.

    ``plugin.report()`` returns it, and ``print`` shows it with one line per parameter.

    >>> from became_avalanche import ProjectionReport
    >>> print(ProjectionReport("GPMPlugin", 1, {"layer.weight": (12, 64)}, ["layer.bias"], ["head.weight"], 6144))
    GPMPlugin after 1 experience, 0.01 MiB
      protected  layer.weight  12 of 64 directions
      frozen     layer.bias
      free       head.weight
    """

    plugin: str
    """Class name of the plugin."""
    experiences: int
    """Number of experiences in the memory."""
    bases: dict[str, tuple[int, int]]
    """Protected weight -> number of protected input directions, and number of all input directions."""
    frozen: list[str]
    """Parameters that do not train: biases of protected layers, and normalisation parameters."""
    free: list[str]
    """Parameters that train freely: task heads, excluded modules, new layers, and everything unprotectable."""
    memory_bytes: int
    """Bytes of all tensors in the plugin's memory."""

    def __str__(self) -> str:
        head = f"{self.plugin} after {self.experiences} experience{'' if self.experiences == 1 else 's'}"
        width = max(map(len, self.bases), default=0)
        lines = [f"{head}, {self.memory_bytes / 2**20:.2f} MiB"]
        lines += [f"  protected  {name:{width}}  {rank} of {of} directions" for name, (rank, of) in self.bases.items()]
        for what, names in (("frozen", self.frozen), ("free", self.free)):
            lines += [f"  {what:9}  {name}" for name in names]
        return "\n".join(lines)

"""Imports between the rooms of the package point downwards only."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "became_avalanche"
MATHS = {"layers", "subspace", "merging"}
PARTS = {"plugins", "benchmarks", "models", "logging", "metrics"}
ALLOWED = {
    "files": set(),
    "layers": set(),
    "subspace": {"layers"},
    "merging": {"layers"},
    "strategy": {"files", *MATHS},
    "plugins": {"files", "results", "strategy", *MATHS},
    "benchmarks": {"files"},
    "models": set(),
    "metrics": {"files", "results", "strategy"},
    "logging": {"results"},
    "results": {"files"},
    "analysis": {"files", "results", "runs", "strategy", *MATHS, *PARTS},
    "runs": {"files", "results", "strategy", *MATHS, *PARTS},
    "cli": {"files", "results", "runs", "analysis"},
    "__main__": {"cli"},
}
"""What each room may import, beside itself."""
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path):
    """The modules that a file imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module
            if node.module == "became_avalanche":
                yield from (f"became_avalanche.{name.name}" for name in node.names)


def test_every_room_is_known():
    assert {room_of(path) for path in FILES} == ALLOWED.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    room, modules = room_of(path), list(imports_of(path))
    rooms = {module.split(".")[1] for module in modules if module.startswith("became_avalanche.")}
    assert rooms <= ALLOWED[room] | {room}
    assert "became_avalanche" not in modules, "the package itself imports all rooms: name the module"
    packages = {module.split(".")[0] for module in modules}
    if room in MATHS | {"files", "results"}:
        assert "avalanche" not in packages
    if room in {"files", "results"}:
        assert "torch" not in packages


def test_rooms_have_an_order():
    """If a room may import another, the other may not import it, however indirectly."""

    def below(room, seen=()):
        assert room not in seen, (*seen, room)
        return {room, *(deeper for other in ALLOWED[room] for deeper in below(other, (*seen, room)))}

    assert below("__main__") == ALLOWED.keys()

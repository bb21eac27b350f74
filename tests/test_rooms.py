"""Who may import whom: every import of the package, those inside functions too, points down."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "grpo_kit"

# From the top floor to the ground; a room may import those on floors below its own, and itself.
TOP_DOWN = (
    "__main__, cli, lab, course, profiles, trl_bridge warm_up, tiny, "
    "self_verification flow, training, hooks runs, rewards, generation, "
    "decoder, tasks, models, smollm2 objective, config paths visible"
)
FLOORS = [rooms.split() for rooms in reversed(TOP_DOWN.split(", "))]
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
# What is narrower than "all below": formulas and loaders know nothing but the config.
ONLY = {
    "objective": {"config"}, "hooks": {"config", "objective", "rewards"},
    "models": {"config", "paths", "smollm2"}, "tasks": {"paths"},
}  # fmt: skip
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def room_of(module: str) -> str:
    return module.removeprefix("grpo_kit.").split(".")[0]


def imports_of(source: str, package: str) -> set[str]:
    """The rooms that a file's imports reach, wherever in it they stand."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"a relative import in {package}: name the module in full"
            names = [alias.name for alias in node.names]
            found |= {f"grpo_kit.{name}" for name in names} if node.module == "grpo_kit" else set()
            found |= {node.module} - {"grpo_kit"}
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            named = [a.value for a in node.args if isinstance(a, ast.Constant)]
            found |= {name for name in named if isinstance(name, str)}
    return {room_of(name) for name in found if name.startswith("grpo_kit.")}


def test_each_file_is_in_a_room_of_the_table():
    assert {room_of(".".join(path.with_suffix("").parts)) for path in FILES} == {*FLOOR, "__init__"}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_down(path):
    room = room_of(".".join(path.with_suffix("").parts))
    for other in imports_of((PACKAGE / path).read_text(), room) - {room}:
        assert FLOOR[other] < FLOOR.get(room, 0), f"{path}: {room} may not import {other}"
        assert other in ONLY.get(room, {other}), f"{path}: {room} imports {other}"

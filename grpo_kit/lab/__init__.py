"""The lab: what makes results, from seeded runs to verdicts on claims, and what measures speed."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`grpo_kit.lab.compare`, imported when it is first used: its modules take seconds."""
    if name != "compare":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_kit.lab.comparison import compare

    return compare

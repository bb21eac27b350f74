"""The picture of each method's loop: what the method adds stands in the method's colour."""

from pathlib import Path

PICTURES = Path(__file__).parent / "pictures"


def loop(method: str) -> str:
    """Return the SVG of a method's loop: basic, diversity, judge, verification, meta,
    flow or scaled.

    It has its own background, light or dark as the reader's system is.
    """
    return (PICTURES / f"{method}.svg").read_text(encoding="utf-8").rstrip()

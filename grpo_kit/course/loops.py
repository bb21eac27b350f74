"""The picture of each method's loop: what the method adds stands in the method's colour."""

from pathlib import Path

PICTURES = Path(__file__).parent / "pictures"


def loop(method: str) -> str:
    """Return the SVG of a method's loop: basic, diversity, judge, verification, meta,
    flow or scaled.

    It has its own background, light or dark as the reader's system is.
    """
    known = sorted(file.stem for file in PICTURES.glob("*.svg"))
    if method not in known:
        raise ValueError(f"there is no loop of {method!r}: choose among {', '.join(known)}.")
    return (PICTURES / f"{method}.svg").read_text(encoding="utf-8").rstrip()

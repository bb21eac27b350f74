"""The tiny world in another setting: the shipped base after more of its warm-up, shares changed.

A lesson or a dial turns one share, so that what its method needs is rare, or what it guards against
is frequent. The base adopts the shares; all else stays nearly as it was.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock

from grpo_kit.models import Policy, load_policy, save_policy
from grpo_kit.paths import cache_dir, data_dir, make_output_dir, sha256_of, write_atomic
from grpo_kit.tiny.pretrain import POOL, warm_up_more
from grpo_kit.tiny.skills import Shares

STEPS = 8 * POOL  # batches of 16; a minute on one core
CARD = "recipe.json"


def recipe(
    *, steps: int = STEPS, seed: int = 1, start: str = "tiny-base", folder: object = None,
    **shares: Any,
) -> dict:  # fmt: skip
    """All that decides what `make_world` makes, as its folder does not; raises as `Shares`."""
    (weights,) = (data_dir() / start).glob("*.safetensors")
    return {**asdict(Shares(**shares)), "steps": steps, "seed": seed, "base": sha256_of(weights)}


def more_of_the_base(shares: Shares, steps: int, seed: int) -> Policy:
    """The shipped base after `steps` more batches."""
    return warm_up_more(load_policy(data_dir() / "tiny-base"), seed, steps, shares=shares)


def make_world(
    *, folder: str | Path | None = None,
    make: Callable[[Shares, int, int], Policy] = more_of_the_base, **given: Any,
) -> Path:  # fmt: skip
    """The shipped base after more batches with other shares, as `recipe` has it; its folder.

    Shares are `solutions`, `checks`, `plans` or `fooled`, see `tiny.skills.Shares`. A base that is
    shipped is taken as it is; another is made once, by `make` from the kit's folder `start`, and
    kept in `folder`, by default in the user's cache. Raises ValueError for shares of styles that
    there are not.
    """
    made_of = recipe(**given)
    text = json.dumps(made_of, indent=1, sort_keys=True) + "\n"
    start = given.get("start", "tiny-base")
    name = f"{start}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if (shipped := data_dir() / name).is_dir():
        return shipped
    folder = make_output_dir(folder or cache_dir() / name).resolve()
    with FileLock(folder / ".lock"):  # of two runs that want it one makes it
        card = folder / CARD
        if not card.exists() or card.read_text(encoding="utf-8") != text:
            card.unlink(missing_ok=True)
            shares = Shares(**{name: made_of[name] for name in Shares.__dataclass_fields__})
            policy = make(shares, made_of["steps"], made_of["seed"])
            policy.model.bfloat16()
            save_policy(policy, folder)
            write_atomic(card, text)
    return folder

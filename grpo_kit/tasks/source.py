"""Published rows from a local folder or from the Hugging Face Hub, with an error for each gap."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datasets


def read_splits(
    folder: str | os.PathLike | None,
    splits: Sequence[str],
    convert: Callable[[dict], dict],
    columns: Sequence[str],
    *,
    name: str,
    url: str,
    **on_hub: str | None,
) -> list[datasets.Dataset]:
    """The rows of each split, from `<split>.jsonl` in `folder`, or from the Hub where it is None.

    `convert` makes a row of a published one whose `columns` hold texts. Errors cite `name` and
    `url`; `on_hub` has `hub_name` and may have `config` and `revision`.

    Raises FileNotFoundError for missing files, RuntimeError where the Hub does not give the
    dataset, ValueError for no row or a bad one, by its number.
    """
    import datasets

    files = [f"{split}.jsonl" for split in splits]
    if folder is None:
        published = _from_hub(files, **on_hub)
    else:
        folder = Path(folder).expanduser()
        if missing := [file for file in files if not (folder / file).is_file()]:
            problem = f"lacks {' and '.join(missing)}" if folder.is_dir() else "is not a folder"
            raise FileNotFoundError(
                f"{str(folder)!r} {problem}: a folder of {name} holds {' and '.join(files)}, "
                f"as published at {url}"
            )
        published = {split: _from_file(folder / f"{split}.jsonl") for split in splits}

    result = []
    for split in splits:
        rows = []
        for i, row in enumerate(published[split], start=1):
            texts = [row.get(column) for column in columns] if isinstance(row, dict) else [None]
            try:
                if not all(isinstance(text, str) and text for text in texts):
                    expected = " and ".join(f"`{column}`" for column in columns)
                    raise ValueError(f"is {row!r:.200}: expected the texts {expected}")
                rows.append(convert(row))
            except ValueError as error:
                raise ValueError(f"row {i} of {split} {error}") from None
        if not rows:
            raise ValueError(f"the {split} split of this {name} is empty: fetch the data again")
        result.append(datasets.Dataset.from_list(rows))
    return result


def _from_file(path: Path) -> Iterator[object]:
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        try:
            if line.strip():
                yield json.loads(line)
        except json.JSONDecodeError as error:
            problem = f"line {number} of {str(path)!r} is not JSON ({error})"
            raise ValueError(f"{problem}: fetch the file again") from error


def _from_hub(files: Sequence[str], hub_name: str, config=None, revision=None) -> dict:
    import datasets
    import huggingface_hub

    try:
        # load_dataset retries an unreachable Hub for half a minute; one request tells at once.
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            huggingface_hub.HfApi().dataset_info(hub_name, revision=revision, timeout=10)
        return datasets.load_dataset(hub_name, config, revision=revision)
    except Exception as error:  # whatever the network, the Hub or its cache raises
        raise RuntimeError(
            f"the Hugging Face Hub did not give the dataset {hub_name!r} ({type(error).__name__}): "
            "check the name and the network, set HF_HUB_OFFLINE=1 if it is in the cache already, "
            f"or pass a local folder with {' and '.join(files)}"
        ) from error

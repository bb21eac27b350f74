"""Published rows from a local folder or from the Hugging Face Hub, with what is missing said."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path


def read_splits(
    path_or_name: str | os.PathLike,
    splits: Sequence[str],
    *,
    config: str | None,
    revision: str | None,
    of: str,
    url: str,
) -> dict[str, Iterable]:
    """The rows of each split, from the `<split>.jsonl` of a folder or from a dataset on the Hub.

    `of`, in words, is what the folder should be, `url` where it can be had. Raises
    FileNotFoundError for a folder without its files, ValueError for a line that is not JSON,
    RuntimeError where the Hub does not give the dataset. HF_HUB_OFFLINE=1 is honoured: the Hub's
    cache is used, and nothing else.
    """
    folder = Path(path_or_name).expanduser()
    if folder.is_dir() or _is_path(path_or_name):
        return _from_folder(folder, splits, f"{of} holds", f"as published at {url}")
    return _from_hub(str(path_or_name), config, revision, splits)


def _is_path(path_or_name: str | os.PathLike) -> bool:
    """Can this only be a path? A name on the Hub is `name` or `owner/name`."""
    text = os.fspath(path_or_name)
    return (
        not isinstance(path_or_name, str)
        or text.startswith((".", "~", os.sep))
        or text.count("/") > 1
        or "\\" in text
    )


def _from_folder(folder: Path, splits: Sequence[str], it: str, source: str) -> dict[str, list]:
    names = [f"{split}.jsonl" for split in splits]
    if missing := [name for name in names if not (folder / name).is_file()]:
        what = f"lacks {' and '.join(missing)}" if folder.is_dir() else "is not a folder"
        raise FileNotFoundError(f"{str(folder)!r} {what}: {it} {' and '.join(names)}, {source}")
    return {split: _read_jsonl(folder / f"{split}.jsonl") for split in splits}


def _read_jsonl(path: Path) -> list:
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"line {number} of {str(path)!r} is not JSON ({error}): fetch the file again"
                ) from error
    return rows


def _from_hub(
    name: str, config: str | None, revision: str | None, splits: Sequence[str]
) -> dict[str, Iterable]:
    # Imported here: `datasets` alone takes seconds, and `import grpo_kit` must not.
    import datasets
    import huggingface_hub

    try:
        # load_dataset retries an unreachable Hub for half a minute; one request tells at once.
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            huggingface_hub.HfApi().dataset_info(name, revision=revision, timeout=10)
        return datasets.load_dataset(name, config, revision=revision)
    except Exception as error:  # whatever the network, the Hub or its cache raises
        files = " and ".join(f"{split}.jsonl" for split in splits)
        raise RuntimeError(
            f"the Hugging Face Hub did not give the dataset {name!r} ({type(error).__name__}): "
            "check the name and the network, set HF_HUB_OFFLINE=1 if it is in the cache already, "
            f"or pass a local folder with {files}"
        ) from error

"""Judges' replies on disk, so that a judgement is paid for once.

One SQLite file. Each reply is a transaction of its own: a killed process loses at most the one that
it was writing, and several processes may share the file. (SQLite's plain journal, not its
write-ahead log: four processes that made such a file at once met "database is locked".)
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from grpo_kit.paths import make_output_dir
from grpo_kit.rewards.judge.texts import PROMPT_VERSION

FILE = "judgements.sqlite"
WAIT = 60.0  # seconds that one process lets another finish writing


def cache_key(judge: str, messages: list[dict]) -> str:
    """A digest of judge, prompt version and the whole prompt, so of question and response."""
    return hashlib.sha256(json.dumps([judge, PROMPT_VERSION, messages]).encode()).hexdigest()


class JudgementCache:
    """Replies by key, in `folder`. Raises RuntimeError where the folder or the file is unusable.

    Opened anew for each use, since a training loop may call from another thread every step.
    """

    def __init__(self, folder: str | Path):
        self.path = make_output_dir(folder) / FILE
        try:
            with closing(self._open()) as connection:
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)"
                )
        except sqlite3.Error as error:
            raise RuntimeError(
                f"cannot use {self.path} as the judge's cache ({error}): delete the file or choose "
                "another cache_dir."
            ) from error

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)
        # A sync to disk takes 4 ms a reply and guards against power cuts only, not against kills.
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        """The replies that are there, by key."""
        query = "SELECT reply FROM replies WHERE key = ?"
        with closing(self._open()) as connection:
            rows = ((key, connection.execute(query, (key,)).fetchone()) for key in keys)
            return {key: row[0] for key, row in rows if row is not None}

    def write(self, key: str, reply: str) -> None:
        """Keep a reply, in place of an earlier one."""
        with closing(self._open()) as connection:
            connection.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))

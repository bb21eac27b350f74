"""Judges' replies on disk, so that a judgement is paid for once."""

import hashlib
import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from grpo_kit.paths import make_output_dir
from grpo_kit.rewards.judge.texts import PROMPT_VERSION

FILE = "judgements.sqlite"
CREATE = "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)"


def cache_key(judge: str, messages: list[dict]) -> str:
    """A digest of judge, prompt version and the whole prompt, so of question and response."""
    return hashlib.sha256(json.dumps([judge, PROMPT_VERSION, messages]).encode()).hexdigest()


class JudgementCache:
    """Replies by key in an SQLite file in `folder`, which processes may share.

    A kill loses at most the reply being written. Each use opens the file anew, since a training
    loop may call from another thread every step. Raises RuntimeError for an unusable folder.
    """

    def __init__(self, folder: str | Path):
        self.path = make_output_dir(folder) / FILE
        try:
            self.read([])
        except sqlite3.Error as error:
            raise RuntimeError(
                f"cannot use {self.path} ({error}): delete it or choose another cache_dir."
            ) from error

    def _open(self) -> closing[sqlite3.Connection]:
        # No write-ahead log: processes that created one together met "database is locked".
        connection = sqlite3.connect(self.path, timeout=60.0, isolation_level=None)
        # A sync to disk takes 4 ms a reply and guards against power cuts only, not against kills.
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute(CREATE)
        return closing(connection)

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        """The replies that are there, by key."""
        query = "SELECT key, reply FROM replies WHERE key = ?"
        with self._open() as connection:
            return dict(row for key in keys for row in connection.execute(query, (key,)))

    def write(self, key: str, reply: str) -> None:
        """Store a reply, in place of an earlier one."""
        with self._open() as connection:
            connection.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))

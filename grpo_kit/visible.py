"""What models, endpoints and files from strangers write, before a person reads it."""

import re
import unicodedata

MOST = 20_000  # characters of one text that a page shows


def shortened(text: str) -> str:
    """`text`, cut where it is longer than a reader reads and a browser bears."""
    rest = len(text) - MOST
    return text if rest <= 0 else f"{text[:MOST]} … ({rest:,} more characters)"


def visible(text: str, newline: str = "⏎\n") -> str:
    """`text` with its control and format characters (bidi, ANSI, zero width) as escapes."""
    return "".join(
        newline if c == "\n" else f"\\u{ord(c):04x}" if unicodedata.category(c)[0] == "C" else c
        for c in re.sub("\r\n|[\u2028\u2029]", "\n", text)
    )

"""Answers: find one in a text, and say whether it is the gold answer.

Numbers are compared exactly, as rationals: `1,080` = `$1,080.00` = `1.08e3`, `1 1/2` = `3/2`. A
percent sign and words that follow (`15 coins`) are units, which are not compared, `k` too; what
models wrap around an answer is removed (`unwrapped`). Anything else is no number (`about 15`,
`3 + 4`) and wrong where the gold answer is one. `tests/rewards/test_accuracy.py` holds the table.

A policy is paid to find mistakes here: nothing below evaluates text, builds a number much longer
than its text, or takes more than linear time.
"""

import re
from fractions import Fraction

MAX_CHARS = 200  # of a text that is read as a number; GSM8K's longest gold answer has 11
MAX_EXPONENT = 308  # as far as a float reaches, since 10**exponent is built in full
MAX_UNIT_WORDS = 6
MAX_LAYERS = 8  # of wrapping, which bounds the time that a hostile answer takes

OPEN, CLOSE = "<answer>", "</answer>"

_SCALES = {"": 1, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_INT = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER = rf"""
    (?P<sign>[-+])? (?:(?:US)?[$€£¥]\s*(?P<sign_after>[-+])?)?
    (?:
        (?:(?P<whole>{_INT})\s+)? (?P<numerator>{_INT})\s*/\s*(?P<denominator>{_INT})
      |
        (?P<decimal>{_INT}(?:\.[0-9]*)?|\.[0-9]+)
        (?:(?:e|\s*[x×*]\s*10\s*\^\s*)(?P<exponent>[-+]?[0-9]+))?
        (?:\s*(?P<scale>hundred|thousand|million|billion)\b)?
    )
    \s*%?"""
_LEADING_NUMBER = re.compile(_NUMBER, re.VERBOSE | re.IGNORECASE)
# In running text a number may not be a piece of a longer one ("1,23,4", "3.14.15", "1e999", "x2"),
# and a sign right after a figure or bracket is a minus between two numbers ("10-3").
_NUMBER_IN_TEXT = re.compile(
    rf"(?<![\w)/])(?<![0-9][.,]){_NUMBER}(?![0-9]|[.,/][0-9]|e[-+]?[0-9])",
    re.VERBOSE | re.IGNORECASE,
)
# A unit starts with a letter or a currency sign; "/" and "-" may stand before ("60/h", "6-inch"),
# but a "-" between spaces is a difference.
_UNIT = re.compile(
    r"(?!.*\s-\s)\s*[-/(]?\s*(?:[^\W\d_²³]|[$€£¥¢°])(?:[^\W\d_]|[\s.'’/()$€£¥¢°-]|\^[23](?![0-9]))*"
)

_MINUS_SIGNS = str.maketrans(dict.fromkeys("−–－﹣", "-"))
_FRAC = r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))"
_LATEX = {  # a fraction after a sign joins it, any other is separated from the text before it
    rf"(?<=[-+]){_FRAC}": r"\1\2/\3\4 ",
    _FRAC: r" \1\2/\3\4 ",
    r"^([-+]?)\\left\(\s*([^(),\\\s][^(),\\]*)\\right\)$": r"\1\2",
    r"\\(?:text|math)(?:rm|bf|it)?\{([^{}]*)\}|\\mbox\{([^{}]*)\}": r" \1\2 ",
    r"\^(?:\s*\{)?\s*\\circ\s*\}?": "°",
    r"\^\{([^{}]*)\}": r"^\1",
    r"\{,\}": ",",
    r"\\boxed\{([^{}]*)\}": r" \1 ",
    r"\\times\b": "×",
    r"\\[,!]": "",
    r"\\([$%])": r"\1",
    r"\\[()\[\]]": " ",
}
# What models put around a whole answer. A pair may not occur inside, as in `$7$ or $8$`.
_PAIRS = (
    ("```", "```"), ("`", "`"), ("**", "**"), ("__", "__"), ("*", "*"),
    ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"),
)  # fmt: skip
_COMMAND = re.compile(r"\\(?:boxed|fbox|mbox|(?:text|math)(?:bf|rm|it|sf)?|boldsymbol|bm)\s*\{")
_BRACE = re.compile(r"(?<!\\)[{}]")


def unwrapped(text: str) -> str:
    r"""Return an answer without what models wrap around it: `\[ \boxed{x} \]`, `**x**.`, `$x$`.

    A wrapping is removed only if it holds the whole answer: `\text{7} or \text{8}` stays.
    """
    text = text.strip()
    for _ in range(MAX_LAYERS):
        inner = _without_a_layer(text).strip()
        if inner == text:
            break
        text = inner
    return text


def _without_a_layer(text: str) -> str:
    if text.endswith(".") and not text.endswith(r"\right."):
        return text[:-1]
    for opening, closing in _PAIRS:
        if not (text.startswith(opening) and text.endswith(closing)):
            continue
        inner = text[len(opening) : -len(closing)]
        again = re.search(rf"(?<!\\){re.escape(opening)}", inner)
        if len(text) >= len(opening + closing) and not again and not inner.endswith("\\"):
            return inner
    command = _COMMAND.match(text)
    if command and _closing_brace(text, command.end()) == len(text) - 1:
        return text[command.end() : -1]
    return text.removeprefix(r"\displaystyle")


def _closing_brace(text: str, start: int) -> int:
    """Where the group that is open at `start` ends, or -1."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return -1


def is_correct(answer: str | None, gold: str) -> bool:
    """Is `answer`, from `extract_answer`, the same number as `gold`, or else the same text?"""
    if answer is None:
        return False
    number = parse_number(gold)
    if number is not None:
        return parse_number(answer) == number
    answer, gold = (_plain(unwrapped(text)).casefold().split() for text in (answer, gold))
    return answer == gold != []


def extract_answer(text: str, lenient: bool = False) -> str | None:
    r"""Return the content of the last complete `<answer>…</answer>`, stripped, or None.

    With `lenient`, for evaluation, a number is looked for, in what is tagged or else in the text:
    the last one in the last `\boxed{…}`, else the first after the last `####`, else the last.
    """
    # Not by a lazy pattern: over thousands of unclosed tags that takes quadratic time.
    start = text.rfind(OPEN, 0, max(text.rfind(CLOSE), 0))
    tagged = None
    if start >= 0:
        start += len(OPEN)
        tagged = text[start : text.find(CLOSE, start)].strip()
    if not lenient or tagged is not None and parse_number(tagged) is not None:
        return tagged
    source = text if tagged is None else tagged
    box = source.rfind(r"\boxed{", 0, max(source.rfind("}"), 0))
    end = _closing_brace(source, box + len(r"\boxed{")) if box >= 0 else -1
    if end >= 0:
        boxed = source[box + len(r"\boxed{") : end].strip()
        return next(reversed(_numbers_in(boxed)), boxed)
    _, mark, after = source.rpartition("####")
    if mark and (numbers := _numbers_in(after)):
        return numbers[0]
    return next(reversed(_numbers_in(source)), tagged)


def _numbers_in(text: str) -> list[str]:
    """The numbers in running text, as they are written."""
    matches = _NUMBER_IN_TEXT.finditer(_plain(text))
    return [match[0].strip() for match in matches if _value(match) is not None]


def parse_number(text: str) -> Fraction | None:
    """Return the number that the whole of `text` states, or None."""
    text = text.strip()
    if len(text) > MAX_CHARS:
        return None
    text = _plain(unwrapped(text))
    # "五" and "Ⅴ" are letters to `re` and would pass for units.
    if any(c.isnumeric() and not c.isascii() and c not in "²³" for c in text):
        return None
    match = _LEADING_NUMBER.match(text)
    if match is None:
        return None
    unit = text[match.end() :]
    if unit and (len(unit.split()) > MAX_UNIT_WORDS or not _UNIT.fullmatch(unit)):
        return None
    return _value(match)


def _plain(text: str) -> str:
    """Strip Markdown and LaTeX, spell minus signs as ASCII."""
    text = text.translate(_MINUS_SIGNS)
    if "\\" in text or "{" in text:
        for pattern, replacement in _LATEX.items():
            text = re.sub(pattern, replacement, text)
    return text.strip().strip("*`").rstrip(".").strip()


def _value(match: re.Match) -> Fraction | None:
    if len(match[0]) > MAX_CHARS or match["sign"] and match["sign_after"]:
        return None
    part = {name: (text or "").replace(",", "") for name, text in match.groupdict().items()}
    exponent = int(part["exponent"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    try:
        if part["denominator"]:
            numerator, denominator = int(part["numerator"]), int(part["denominator"])
            value = int(part["whole"] or 0) + Fraction(numerator, denominator)
        else:
            scale = _SCALES[part["scale"].lower()]
            value = Fraction(part["decimal"]) * Fraction(10) ** exponent * scale
    except (ZeroDivisionError, KeyError):  # 1/0; IGNORECASE takes "ſ" for an s, lower() does not
        return None
    return -value if "-" in (part["sign"], part["sign_after"]) else value

"""The text of a prompt or completion, whichever of the two forms of TRL's protocol it comes in."""

from __future__ import annotations


def completion_text(completion: str | list[dict]) -> str:
    """Return what the policy wrote: the string itself, or the text of its messages.

    Of a message list only the assistant's messages count (a message without a role is the
    assistant's), joined by newlines: a tool's output must not be able to bring in an answer.
    `content` may be None (a bare tool call) or a list of parts, of which the text is taken.

    Raises TypeError for anything else.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list) or not all(isinstance(m, dict) for m in completion):
        raise TypeError(
            f"a completion is a string or a list of messages, not {type(completion).__name__}: "
            "decode token ids before calling the reward"
        )
    own = (m for m in completion if m.get("role", "assistant") == "assistant")
    return "\n".join(_content_text(m.get("content")) for m in own)


def question_text(prompt: str | list[dict]) -> str:
    """Return the question: the string itself, or the text of the last message of the user."""
    if isinstance(prompt, str):
        return prompt
    asked = [message for message in prompt if message.get("role") == "user"]
    return _content_text(asked[-1].get("content")) if asked else ""


def _content_text(content: str | list[dict] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text") or "" for part in content)

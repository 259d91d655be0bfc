"""The text of prompts and completions, which TRL hands over as strings or as chat messages."""

from __future__ import annotations

from typing import Any


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """The text of one completion: the string itself, or the content of a chat completion's last message.

    An empty list of messages has the text "".
    """
    if isinstance(completion, str):
        return completion
    return content_text(completion[-1].get("content")) if completion else ""


def content_text(content: str | list[dict[str, Any]] | None) -> str:
    """The text of a message's content: a string, parts of which the text ones count, or None (a tool call)."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or [] if part.get("type") == "text")


__all__ = ["completion_text", "content_text"]

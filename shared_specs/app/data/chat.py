"""`--chat`: conversations in the Hugging Face messages format as documents of which only the assistant's tokens count."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shared_specs.app.data.text import read_file
from shared_specs.app.models.chat_template import ChatTemplate, RefusedError
from shared_specs.app.models.tokenizer import ModelTokenizer
from shared_specs.app.options import InputError

# Roles that templates know, which may leave out part of what is said; nobody means a message of another one to be left out.
_ROLES = ("system", "developer", "user", "assistant", "tool")
_FORMAT = '{"messages": [{"role": ..., "content": ...}, ...]}'


class Conversation(NamedTuple):
    """One conversation's tokens.

    Attributes:
        ids: int32. said: bool; which of them the assistant says.
    """

    ids: np.ndarray
    said: np.ndarray


def read_chat(path: str) -> list[dict[str, Any]]:
    """Return the conversations of a file: JSON lines, or one JSON list.

    Raises:
        InputError: the file cannot be read, or what is in it is something else.
    """
    text = read_file(path, "--chat")
    try:
        found = json.loads(text)
        found = found if isinstance(found, list) else [found]
    except ValueError:
        found = [_line(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not found:
        raise InputError(f"finetune: --chat must hold conversations, got {path}, which has none.")
    for number, conversation in enumerate(found, 1):
        wrong = _wrong(conversation)
        if wrong is not None:
            raise InputError(f"finetune: --chat {path}: conversation {number} must be {_FORMAT}, got {wrong}.")
        if not any(message["role"] == "assistant" for message in conversation["messages"]):
            raise InputError(
                f"finetune: --chat {path}: conversation {number} has no turn of the assistant, so there is nothing to learn "
                "from it. Leave it out."
            )
    return found


def _line(path: str, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InputError(f"finetune: --chat {path}: line {number} is no JSON ({error}).") from error


def _wrong(conversation: Any) -> str | None:
    """Return what a conversation has in place of the format; None where it has it."""
    if not isinstance(conversation, dict):
        return f"a {type(conversation).__name__}"
    messages = conversation.get("messages")
    if not isinstance(messages, list) or not messages:
        return (
            f'no "messages" (its keys are {", ".join(conversation) or "none"})'
            if messages is None
            else "no messages in it"
        )
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f'message {number} without a "role"'
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            return f'message {number} without a "content"'
    return None


def tokenized(
    conversation: Mapping[str, Any], tokenizer: ModelTokenizer, template: ChatTemplate, where: str
) -> Conversation:
    """Return a conversation's tokens; a token is the assistant's if it begins in what the assistant says.

    Args:
        conversation: of `read_chat`. where: what it is, for messages.

    Raises:
        InputError: the template cannot say it, leaves a message of an unknown role out, or nothing of it is the assistant's.
    """
    messages = conversation["messages"]
    try:
        text, spans = template.render(messages, conversation.get("tools"))
    except RefusedError as error:
        raise InputError(f"finetune: {where}: {error}.") from error
    for message in messages:
        content, role = message.get("content"), message["role"]
        if role not in _ROLES and isinstance(content, str) and content.strip() not in text:
            raise InputError(f"finetune: {where}: the model's chat template leaves out what the role {role!r} says.")
    encoded = tokenizer.backend.encode(text, add_special_tokens=False)
    begins = np.array([begin for begin, _ in encoded.offsets], np.int64)
    said = np.zeros(begins.shape, bool)
    for begin, end in spans:
        said |= (begins >= begin) & (begins < end)
    if not said.any():
        raise InputError(f"finetune: {where}: the assistant says nothing in it, by the model's chat template.")
    return Conversation(np.array(encoded.ids, np.int32), said)

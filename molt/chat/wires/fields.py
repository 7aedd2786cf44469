"""Fields of JSON bodies, and how they are refused."""

from typing import NoReturn

from molt.chat.protocol import ChatError
from molt.types import Json


def refuse(message: str, status: int = 400, code: str = "invalid_request") -> NoReturn:
    """Raise ChatError."""
    raise ChatError(status, code, message)


def items(body: Json, key: str) -> list[Json]:
    """`body[key]`, a list of objects; absent or null is an empty one."""
    value = body.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        refuse(f"`{key}` must be a list of objects. Send it as the protocol has it.")
    return value

"""The two errors of the public face and the two forms of their message."""

from typing import Never


class SpecError(ValueError):
    """Error for a wrong value: a shape, a dtype, a number out of its range."""


class UnsupportedError(NotImplementedError):
    """Error for a valid value that this machine, backend or mode does not support."""


def error_text(function: str, argument: str, rule: str, got: object, *, shapes: str = "", advice: str = "") -> str:
    """`<function>: <argument> must be <rule>, got <value>[ (the shapes that matter)]. <what to do instead>`."""
    text = f"{function}: {argument} must be {rule}, got {got}"
    if shapes:
        text += f" ({shapes})"
    text += "."
    return f"{text} {advice}" if advice else text


def fail(function: str, argument: str, rule: str, got: object, *, shapes: str = "", advice: str = "") -> Never:
    """Raise SpecError in the one form."""
    raise SpecError(error_text(function, argument, rule, got, shapes=shapes, advice=advice))


def fail_type(function: str, argument: str, rule: str, got: object, *, advice: str = "") -> Never:
    """Raise TypeError, for a wrong kind of value, in the one form."""
    raise TypeError(error_text(function, argument, rule, got, advice=advice))


def refusal_text(function: str, wrong: str, *, advice: str = "") -> str:
    """Return `<function>: <what is wrong>. <what to do instead>`, the form for an error that got no wrong value."""
    return f"{function}: {wrong}. {advice}" if advice else f"{function}: {wrong}."


def fail_with(function: str, wrong: str, *, advice: str = "") -> Never:
    """Raise SpecError in the form of `refusal_text`."""
    raise SpecError(refusal_text(function, wrong, advice=advice))


def show_shape(shape: tuple[int, ...]) -> str:
    """`[32, 4096]`."""
    return "[" + ", ".join(str(size) for size in shape) + "]"

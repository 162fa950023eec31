"""What a compiled kernel does to device memory, read from its PTX: for kernels without loops, whose registers are set once."""

import re
from collections import Counter
from typing import NamedTuple

_ACCESS = re.compile(r"(ld|st)\.global\S*?(?:\.v(\d))?\.[a-z](\d+)\s.*\[(%rd\d+)(?:\+(-?\d+))?\]")
_SET = re.compile(r"^\s*([a-z][\w.:]*)\s+(%r[d]?\d+), (.+);", re.MULTILINE)


class Access(NamedTuple):
    """Of one thread: bytes from the beginning of the array, and how many at once."""

    first: int
    size: int


def accesses(ptx: str, *, program: int, thread: int) -> list[Access]:
    """Every load and store of one thread of a one-dimensional grid, in the order of the program."""
    set_by = {register: (op, arguments.split(", ")) for op, register, arguments in _SET.findall(ptx)}
    special = {"%ctaid.x": program, "%tid.x": thread}

    def value(name: str) -> int:
        if name in special:
            return special[name]
        if not name.startswith("%"):
            return int(name, 0)
        op, arguments = set_by[name]
        if op.startswith("ld.param"):
            return 0
        a, *rest = (value(argument) for argument in arguments)
        bits = 64 if op.endswith("64") else 32
        match op.split(".")[0]:
            case "mov" | "cvta":
                return a
            case "add":
                return (a + rest[0]) % 2**bits
            case "and":
                return a & rest[0]
            case "or":
                return a | rest[0]
            case "shl":
                return (a << rest[0]) % 2**bits
            case "mul" if op.startswith("mul.wide"):
                signed = op.endswith(".s32")
                return (_signed(a) if signed else a) * (_signed(rest[0]) if signed else rest[0]) % 2**64
        raise ValueError(f"{op} is not known here: {name}")

    found = [(value(register) + int(offset or 0), vector, bits) for _, vector, bits, register, offset in _all(ptx)]
    return [Access(first, int(vector or 1) * int(bits) // 8) for first, vector, bits in found]


def counts(ptx: str) -> Counter[int]:
    """How many loads and stores there are, by the bytes of a thread at once, of a kernel of any form."""
    return Counter(int(vector or 1) * int(bits) // 8 for _, vector, bits, *_ in _all(ptx))


def _all(ptx: str) -> list[tuple[str, ...]]:
    return _ACCESS.findall(ptx)


def _signed(a: int) -> int:
    return a - 2**32 if a >= 2**31 else a

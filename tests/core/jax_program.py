"""What a compiled program holds: collectives outside and inside of its loops, and the products of one device."""

import math
import re
from collections import Counter


def counted(text: str | None, *, turns: int = 1) -> tuple[Counter[str], Counter[str], int]:
    """Collectives of a compiled program outside and inside of its loops, and the multiply-adds of its products: a device's.

    turns: how often a loop runs of which the program does not say it.
    """
    assert text is not None
    found: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    products = [0]
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if heading := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = heading[1]
        bodies.setdefault(name, []).append(line)

    def visit(name: str, count: int, in_loop: bool) -> None:
        shapes = {
            m[1]: m[2] for line in bodies[name] if (m := re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = \w+\[([\d,]*)\]", line))
        }
        for line in bodies[name]:
            for op in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"):
                if re.search(rf" {op}(-start)?\(", line):
                    found[in_loop][op] += 1
            if m := re.match(r"\s*(?:ROOT )?%?[\w.\-]+ = \w+\[([\d,]*)\]\S* dot\((.*)", line):
                left = re.findall(r"%?([\w.\-]+)", m[2].split(",")[0].split()[-1])[0]
                dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)
                assert dims is not None
                sizes = [int(n) for n in shapes[left].split(",")]
                products[0] += (
                    count * math.prod(map(int, m[1].split(","))) * math.prod(sizes[int(i)] for i in dims[1].split(","))
                )
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            loop = " while(" in line
            for inner in re.findall(r"(?:to_apply|calls|body|branch_computations)=\{?%?([\w.\-]+)", line):
                visit(inner, count * (1 if not loop else int(trips[1]) if trips else turns), in_loop or loop)

    visit(re.findall(r"ENTRY %?([\w.\-]+)", text)[0], 1, False)
    return found[False], found[True], products[0]

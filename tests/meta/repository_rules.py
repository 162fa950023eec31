"""What every file of the repository keeps to, as checkers on source text, so that each can be shown to fail."""

import ast
import re
from collections.abc import Iterator

# Spelled so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.}])/(?:work|tmp|root|home|opt|Users)(?=/|\b)")
PACKAGE_HOST = re.compile(r"(?:py" r"pi\.org|python" r"hosted\.org|--(?:extra-)?index" r"-url|--find" r"-links)")
LOOSE_TODO = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b(?!.*https?://)")
BANNER = re.compile(r"^\s*#\s*[-=*#~_]{4,}")

TOLERANCE_ARGUMENTS = {"atol", "rtol", "abs_tol", "rel_tol", "tol", "tolerance", "rel", "abs"}
COMPARERS = {
    "allclose",
    "isclose",
    "assert_allclose",
    "assert_close",
    "assert_array_almost_equal",
    "approx",
    "gradcheck",
}
# Central differences are as near as their step lets them be; what compares two results has to say how near they must be.
COMPARED = COMPARERS - {"gradcheck"}
# A float this small that something is compared with is a tolerance, whatever it is called.
SMALL = 0.01


def docstring_fault(source: str) -> str | None:
    """None when the module opens with a docstring that is more than a word."""
    text = ast.get_docstring(ast.parse(source)) or ""
    return None if len(text.split()) >= 4 else "the module needs a docstring of at least one sentence"


def wording_faults(source: str) -> list[str]:
    """Public functions and classes whose docstring opens with "What", and public `check_...` that name no error.

    A docstring says what is returned or done; a reader of a check wants to know what it raises.
    """
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        text = ast.get_docstring(node) or ""
        if re.match(r"What\b", text):
            found.append(f"line {node.lineno}: {node.name}: say what is returned or done, beginning with a verb")
        if node.name.startswith("check_") and not re.search(r"\b[A-Z]\w*Error\b", text):
            found.append(f"line {node.lineno}: {node.name}: say which error is raised")
    return found


def text_faults(text: str) -> list[str]:
    """Lines that name a machine's path or a package host, leave work without a link, or draw a banner."""
    rules = {
        "a machine's path": MACHINE_PATH,
        "a package host": PACKAGE_HOST,
        "a loose end": LOOSE_TODO,
        "a banner": BANNER,
    }
    return [
        f"line {number}: {name}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        for name, pattern in rules.items()
        if pattern.search(line)
    ]


def tolerance_faults(source: str) -> list[str]:
    """Tolerance numbers written out instead of read from shared_specs.tolerances; 0, which means exact, is none. Nor may a
    library's comparison bring its own."""
    return [f"line {line}: {what}" for node in ast.walk(ast.parse(source)) for line, what in _tolerances(node)]


def _tolerances(node: ast.AST) -> Iterator[tuple[int, str]]:
    match node:
        case ast.Call(func=function):
            # A name by itself is a helper of the suite.
            if isinstance(function, ast.Attribute) and function.attr in COMPARED and not _says_how_near(node):
                yield node.lineno, f"{function.attr} with its own tolerances"
            yield from _numbers(node)
        case ast.Compare():
            sides = [side for side in (node.left, *node.comparators) if _is_number(side, below=SMALL)]
            yield from ((side.lineno, ast.unparse(node)) for side in sides)
        case ast.FunctionDef(args=arguments):
            named = (arguments.posonlyargs + arguments.args)[::-1]
            pairs = [*zip(named, arguments.defaults[::-1], strict=False)]
            pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None]
            faults = [(a, d) for a, d in pairs if a.arg in TOLERANCE_ARGUMENTS and _is_number(d)]
            yield from ((default.lineno, f"{a.arg}={ast.unparse(default)}") for a, default in faults)


def _says_how_near(node: ast.Call) -> bool:
    compared = 1 if ast.unparse(node.func).endswith("approx") else 2
    return len(node.args) > compared or any(k.arg is None or k.arg in TOLERANCE_ARGUMENTS for k in node.keywords)


def _numbers(node: ast.Call) -> Iterator[tuple[int, str]]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    given = [keyword.value for keyword in node.keywords if keyword.arg in TOLERANCE_ARGUMENTS]
    positional = node.args[1 if name == "approx" else 2 :] if name in COMPARERS else []
    faults = [value for value in (*given, *positional) if _is_number(value)]
    yield from ((value.lineno, f"{name}({ast.unparse(value)})") for value in faults)


def _is_number(node: ast.expr, below: float = float("inf")) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < node.value < below

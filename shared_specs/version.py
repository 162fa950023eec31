"""The version of the installed project."""

import importlib.metadata

PROJECT = "tiled-mlp"
_NONE = "not installed"


def own_version() -> str:
    """Return the version, or "not installed" in a bare checkout."""
    try:
        return importlib.metadata.version(PROJECT)
    except importlib.metadata.PackageNotFoundError:
        return _NONE


def package_version() -> str:
    """Return what the `__version__` of each package is: the project's, in a form that tools can compare.

    Example:
        >>> package_version()[0].isdecimal()
        True
    """
    found = own_version()
    return "0+unknown" if found == _NONE else found

"""The tolerances, pinned by a digest: to loosen one takes a change here, that says why. Numbers stay where they live."""

from hashlib import sha256

from shared_specs import tolerances
from shared_specs.tolerances import FLOOR, limit


def test_no_tolerance_moves_unseen() -> None:
    found = sorted((name, repr(value)) for name, value in vars(tolerances).items() if name.isupper())
    assert sha256(repr(found).encode()).hexdigest()[:16] == "030900ad0ed75048"


def test_the_limit_is_twice_the_baseline_and_the_floor() -> None:
    assert limit(0, "float16") == FLOOR["float16"]
    assert limit(8, "float32") == 16 + FLOOR["float32"]

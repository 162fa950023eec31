"""What every comparison of the two halves runs under."""

from tests.on_jax.compiling import _compiled_once_a_session  # noqa: F401  (fixture)

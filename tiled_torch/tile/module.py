"""A module that stands for another one, which it owns under the same keys in `state_dict()`."""

from typing import Any

from torch import nn

# The name that PyTorch's own checkpoint wrapper has for it, which distributed checkpoints and FSDP take out of every key.
INNER = "_checkpoint_wrapped_module"


class Standing(nn.Module):
    """Stands for its only child: what it does not have itself it reads, writes and indexes there.

    Its own hooks run once for each of its own calls. The names of parameters say that it stands in between.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_without_inner)
        self.register_load_state_dict_pre_hook(_with_inner)
        self.register_load_state_dict_post_hook(_names_without_inner)
        self.training = module.training
        setattr(self, INNER, module)

    @property
    def _stands_for(self) -> nn.Module:
        """The module that this one stands for, as it is now."""
        inner = self._modules[INNER]
        assert inner is not None
        return inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (inner := _inner_of(self)) is None:
                raise
            return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = _inner_of(self)
        if inner is None or name == INNER or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    def __getitem__(self, index: Any) -> Any:
        return self._stands_for[index]  # type: ignore[index]


def _inner_of(module: nn.Module) -> nn.Module | None:
    return module.__dict__.get("_modules", {}).get(INNER)


def _without_inner(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """Take INNER out of the keys; versions of modules stay under both names, since loading asks for the long ones."""
    for key in [key for key in state if key.startswith(f"{prefix}{INNER}.")]:
        state[prefix + key[len(prefix) + len(INNER) + 1 :]] = state.pop(key)
    metadata = getattr(state, "_metadata", {})
    for key in [key for key in metadata if f"{key}.".startswith(f"{prefix}{INNER}.")]:
        metadata[f"{prefix}{key[len(prefix) + len(INNER) + 1 :]}".rstrip(".")] = metadata[key]


def _with_inner(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}{INNER}.{key[len(prefix) :]}"] = state.pop(key)


def _names_without_inner(module: nn.Module, incompatible: Any) -> None:
    for names in (incompatible.missing_keys, incompatible.unexpected_keys):
        names[:] = [name.replace(f"{INNER}.", "") for name in names]

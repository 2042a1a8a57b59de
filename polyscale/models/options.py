"""The base class of all configurations, which refuses unknown options.

transformers sets any name as an attribute, so `HKTConfig(level=1)` would have three levels.
"""

import warnings
from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, ClassVar

import transformers
from packaging.version import Version
from transformers import GenerationConfig, PreTrainedConfig

# Options of `PreTrainedConfig` and names in its files that are neither fields nor properties.
_EXTRA = {
    "attn_implementation",
    "auto_map",
    "custom_pipelines",
    "experts_implementation",
    "function_to_apply",
    "quantization_config",
    "task_specific_params",
    "tie_word_embeddings",
    "tokenizer_class",
    "use_cache",
}
_TOKEN_IDS = {name for name in GenerationConfig().to_dict() if name.endswith("_token_id")}
_OF_GENERATION = set(GenerationConfig().to_dict()) - _TOKEN_IDS - _EXTRA


class CheckedConfig(PreTrainedConfig):
    """A configuration that refuses unknown options, and names the nearest known one.

    A saved file may come from another version of transformers or have entries of another library:
    there, an unknown name that resembles no option is kept, with a warning.
    """

    # The options for names of other libraries, which resemble another option or none.
    other_names: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("d_model", "dim", "width", "n_embd"), "hidden_size"),
        **dict.fromkeys(("layers", "n_layer", "n_layers", "num_layers"), "num_hidden_layers"),
        **dict.fromkeys(("heads", "n_head", "n_heads"), "num_attention_heads"),
    }

    def __post_init__(self, **kwargs: Any) -> None:
        """Refuse unknown options; transformers does the rest."""
        for name in self._unknown(kwargs):
            raise ValueError(self._unknown_option(name))
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a saved configuration; `kwargs` replace its values."""
        if not kwargs.get("return_unused_kwargs"):  # the caller checks what it gets back
            _refuse(cls, [name for name in cls._unknown(kwargs) if cls._is_like_ours(name)])
        # transformers drops the generation settings of old files.
        unknown = [name for name in cls._unknown(config_dict) if name not in _OF_GENERATION]
        if not _is_newer(config_dict.get("transformers_version")):
            _refuse(cls, [name for name in unknown if cls._is_like_ours(name)])
        if unknown:
            warnings.warn(
                f"the saved {cls.__name__} has options that are unknown to polyscale and to "
                f"transformers {transformers.__version__} and have no effect: {', '.join(unknown)}",
                stacklevel=2,
            )
        known = {
            name: value
            for name, value in config_dict.items()
            if name not in cls._unknown(config_dict)
        }
        found = super().from_dict(known, **kwargs)
        config = found[0] if isinstance(found, tuple) else found
        for name in unknown:
            setattr(config, name, config_dict[name])
        return found

    @classmethod
    def option_names(cls) -> list[str]:
        """The options that classes of this library declare, in this order."""
        ours = [base for base in cls.__mro__ if issubclass(base, CheckedConfig)]
        declared = {name for base in ours for name in base.__annotations__}
        return [field.name for field in fields(cls) if field.name in declared]

    def check_sizes(self, *more: str) -> None:
        """Raise unless the sizes that all models have, and `more`, are possible."""
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", *more):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads, got {self.hidden_size} "
                f"and {self.num_attention_heads}"
            )
        if self.intermediate_size is not None and self.intermediate_size < 1:
            raise ValueError(
                f"intermediate_size must be None or at least 1, got {self.intermediate_size}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    @classmethod
    def _own(cls) -> list[str]:
        inherited = {field.name for field in fields(PreTrainedConfig)}
        return sorted({field.name for field in fields(cls)} - inherited)

    @classmethod
    def _unknown(cls, names: Iterable[str]) -> list[str]:
        known = {field.name for field in fields(cls)} | _EXTRA | _TOKEN_IDS
        return [
            name
            for name in names
            if name not in known
            and not name.startswith("_")  # state of transformers in `to_dict`
            and (not hasattr(cls, name) or callable(getattr(cls, name)))  # properties are options
        ]

    @classmethod
    def _is_like_ours(cls, name: str) -> bool:
        return bool(get_close_matches(name.lower(), cls._own(), n=1, cutoff=0.7))

    @classmethod
    def _unknown_option(cls, name: str) -> str:
        names = [*cls._own(), "num_labels"]
        close = get_close_matches(name.lower(), names, n=1, cutoff=0.6)
        if name in cls.other_names:
            advice = f"use {cls.other_names[name]}"
        elif name in _OF_GENERATION:
            advice = "pass it to generate(), or set it in generation_config"
        elif close:
            advice = f"did you mean {close[0]}?"
        else:
            advice = f"its options are {', '.join(names)}"
        return f"{cls.__name__} has no option {name!r}; {advice}"


def _refuse(config_class: type[CheckedConfig], names: list[str]) -> None:
    for name in names:
        raise ValueError(config_class._unknown_option(name))


def _is_newer(version: Any) -> bool:
    """Whether a file was written by a newer version of transformers than the installed one."""
    try:
        return Version(str(version)) > Version(transformers.__version__)
    except ValueError:
        return False

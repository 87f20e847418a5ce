"""transformers' continuous batching: paged caches and prefix sharing, attended by warploom.

`warploom.register_huggingface` serves everything else: static and dynamic caches, `generate`,
assisted decoding. Continuous batching takes only names that contain "flash", so that its name here
is `warploom_flash`; models loaded with it do all else as with `warploom`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warploom.engines.transformers.variants import Choice

TESTED = ">=5.19,<5.24"
NAME = "warploom_flash"
NAME_BY_TABLES = "warploom_flash_2"


def register(name: str = NAME, *, variant: Choice | None = None) -> None:
    """Make `attn_implementation="warploom_flash"` known, for `generate_batch` and its manager.

    On CUDA, steps that only decode come with block tables if the name has "flash" and a 2 or 3
    after it, as `NAME_BY_TABLES` does: transformers then lists no places of tokens on the host.

    It sets three private names of `transformers.modeling_flash_attention_utils`, by which
    transformers remembers that the functions of a flash implementation are loaded: it would look
    for a package of this name otherwise. Another flash implementation makes it forget all names of
    warploom, with each forward; call this again before a model gets one of them.

    It also makes runs on a GPU begin when their inputs are empty (`engines.transformers.resets`).

    Args:
        name: another name to register under; it must contain "flash".
        variant: chooses what layers compute, in place of the model. It is given an
            `engines.layers.AttentionLayer`, once for each layer, and returns a `warploom.Variant`,
            or None for `layer.variant`, which is what the model means.

    Raises:
        ArgumentError: a name that continuous batching refuses, or a variant that is no function.
        MissingPackage: there is no transformers.
        WrongEngineVersion: another transformers than was tested.
    """
    from warploom.engines.versions import check_version
    from warploom.errors import ArgumentError, MissingPackage

    if not isinstance(name, str) or "flash" not in name:
        reason = (
            f"is {name!r}; continuous batching takes names that contain 'flash' alone, like "
            f"{NAME!r}, and a variant is given as variant=..."
        )
        raise ArgumentError(name="name", reason=reason)
    try:
        from transformers import __version__
    except ImportError as error:
        raise MissingPackage(
            what="continuous batching", package="transformers", requirement="warploom[transformers]"
        ) from error
    check_version(
        "transformers", "transformers", __version__, TESTED,
        "Without continuous batching, attn_implementation='warploom' serves others too.",
    )  # fmt: skip
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        modeling_flash_attention_utils,
    )

    from warploom.engines.transformers.continuous import attention_forward
    from warploom.engines.transformers.masks import make_mask_or_none
    from warploom.engines.transformers.resets import wait_for_resets
    from warploom.engines.transformers.variants import OwnVariants

    attend = attention_forward
    if variant is not None:
        attend = partial(attention_forward, own_variants=OwnVariants(variant))
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask_or_none)
    wait_for_resets()
    loaded: Any = modeling_flash_attention_utils
    _REGISTERED.add(name)
    loaded._loaded_implementation = _AnyRegistered(name)
    loaded._process_flash_kwargs_fn = dict
    loaded._flash_with_kvcache_fn = _not_called  # there is one: so block tables are offered


_REGISTERED: set[str] = set()


class _AnyRegistered(str):
    """What transformers compares a model's name with, which it remembers only one of."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(other) in _REGISTERED

    def __ne__(self, other: object) -> bool:
        return not self == other


def _not_called(*args: Any, **kwargs: Any) -> None:
    from warploom.engine_errors import UnsupportedByEngine

    raise UnsupportedByEngine(
        what="calls of flash_attn_with_kvcache",
        engine="transformers' continuous batching",
        reason="its attention functions take block tables themselves",
        remedy="Register the model's attention again: warploom.engines.transformers.register().",
    )

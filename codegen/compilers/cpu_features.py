"""Which instruction sets compiled code needs, and which ones this machine's processor has.

Both are named as Linux names them in `/proc/cpuinfo`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

X86 = ("x86_64", "AMD64", "i686")
_CPUINFO = Path("/proc/cpuinfo")
# Instruction sets that compilers use unasked; others, such as SHA, no header of ours asks for.
_UNASKED = re.compile(
    r"__(SSE|SSE2|SSE3|SSSE3|SSE4_1|SSE4_2|SSE4A|POPCNT|F16C|FMA|FMA4|XOP|TBM|BMI|BMI2|LZCNT|"
    r"MOVBE|ADX|GFNI|VAES|APX_F|AVX[A-Z0-9_]*?|AMX_[A-Z0-9_]+?)__"
)
# Macros whose name in lower case is not what Linux says.
_LINUX = {
    "SSE3": "pni", "BMI": "bmi1", "LZCNT": "abm", "APX_F": "apx",
    "AVXVNNI": "avx_vnni", "AVXIFMA": "avx_ifma", "AVX512VBMI2": "avx512_vbmi2",
    "AVX512VNNI": "avx512_vnni", "AVX512BITALG": "avx512_bitalg", "AVX512BF16": "avx512_bf16",
    "AVX512VPOPCNTDQ": "avx512_vpopcntdq", "AVX512FP16": "avx512_fp16",
    "AVX512VP2INTERSECT": "avx512_vp2intersect", "AVX5124VNNIW": "avx512_4vnniw",
    "AVX5124FMAPS": "avx512_4fmaps",
}  # fmt: skip


def needed(macros: Iterable[str], machine: str) -> tuple[str, ...]:
    """What a processor must have to run code that was compiled with these macros predefined.

    Args:
        macros: names that the compiler predefines.
        machine: of `platform.machine()`.

    Returns:
        Instruction sets. Where some have no name in this machine's `/proc/cpuinfo`, its model
        stands for those that it does not tell; and elsewhere than on x86, where macros have no
        counterparts there, all that it tells.
    """
    here = available() or frozenset()
    if machine not in X86:
        return tuple(sorted(here))
    found = (match[1] for name in macros if (match := _UNASKED.fullmatch(name)))
    sets = {_LINUX.get(name, name.lower()) for name in found}
    untold = {name for name in sets if name not in here and name not in _TOLD}
    models = {name for name in here if name.startswith("model:")}
    return tuple(sorted((sets - untold) | (models if untold else set())))


@lru_cache(maxsize=1)
def available() -> frozenset[str] | None:
    """What every core of this machine has, its model as `model:...`; None where no file tells."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return parse(text)


def parse(cpuinfo: str) -> frozenset[str] | None:
    """The same of the text of a `/proc/cpuinfo`."""
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    if not lines:
        return None
    shared = frozenset.intersection(*(frozenset(line.split()) for line in set(lines)))
    pattern = r"^(?:vendor_id|cpu family|model|CPU implementer|CPU part)\s*: *(.*)$"
    models = re.findall(pattern, cpuinfo, re.MULTILINE)
    return shared | {"model:" + "/".join(sorted(set(models)))}


# Instruction sets that Linux tells where a processor has them, so that silence means no.
_TOLD_WORDS = (
    "sse sse2 pni ssse3 sse4_1 sse4_2 sse4a popcnt f16c fma fma4 xop tbm bmi1 bmi2 abm movbe adx "
    "gfni vaes avx avx2 avx_vnni avx512f avx512cd avx512bw avx512dq avx512vl avx512er avx512pf "
    "avx512ifma avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg avx512_vpopcntdq avx512_bf16 "
    "avx512_fp16 avx512_vp2intersect avx512_4vnniw avx512_4fmaps amx_tile amx_int8 amx_bf16"
)
_TOLD = frozenset(_TOLD_WORDS.split())

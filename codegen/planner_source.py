"""Source of the planners that hosts and devices run: one text per mask.

The algorithms lie in `templates/common/warploom/planner/` and, longest first, for hosts alone, in
`templates/cpu/warploom/host_planner/`; rendered text adds the constants and records of planning,
the parameters and the mask's interval analysis. Tile sizes, heads and formats are parameters, so
all variants without a mask share one planner.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from warploom.codegen.abi import ParamField, input_fields, ordered
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.kinds import KernelSpec, Language
from warploom.codegen.launch_shape import LaunchShape
from warploom.codegen.lowering.interval_cpp import tile_functions
from warploom.codegen.source import KernelSource
from warploom.dsl.types.ir import Node, walk
from warploom.dsl.types.spec import TracedVariant

# of hosts alone
MEASURE, ROLE_TILES, REPLAN = "warploom_measure", "warploom_role_tiles", "warploom_replan"

# Members of the planner's `Params`, in the order in which the runtime writes them.
INPUTS = ("qo_indptr", "kv_indptr", "last_page_len", "kv_indices")
OUTPUTS = ("header", "cta_indptr", "openings", "segments", "merges", "items", "indices")
BATCH = (
    ("num_requests", "requests"),
    ("max_q_rows", "query rows of all requests that are admitted"),
    ("max_kv_len", "keys of a request that are admitted"),
    ("max_blocks", "pages that are admitted"),
)
SITE = (
    ("storage", "warploom::Storage"),
    ("page_size", "tokens of a page, if storage is paged"),
    ("max_requests", "requests that the scratch memory holds"),
    ("max_tiles", "query tiles that the scratch memory holds"),
    ("num_ctas", "CTAs of the grid"),
    ("lines", "equal lines of items"),
    ("heads_per_line", "key/value heads of a line"),
    ("slices", "CTAs of a line"),
    ("rows", "fused query rows of a tile"),
    ("keys", "keys of a tile"),
    ("group_size", "query heads per key/value head"),
    ("num_q_heads", "query heads"),
    ("num_kv_heads", "key/value heads"),
    ("fixed", "cost of an item without keys"),
    ("per_tile", "cost of a key tile"),
    ("grain", "key tiles of the shortest piece"),
    ("partial", "cost of a partial result"),
)
# Behind these where there are two roles; those of prefills are above. Lines and slices are not
# fixed then.
ROLE_SITE = (
    ("active_ctas", "CTAs that may get work"),
    ("decode_rows", "fused query rows of a tile of decodes"),
    ("decode_keys", "keys of such a tile"),
    ("decode_fixed", "cost of an item of decodes without keys"),
    ("decode_per_tile", "cost of a key tile of decodes"),
    ("decode_grain", "key tiles of the shortest piece of decodes"),
    ("decode_partial", "cost of a partial result of decodes"),
    ("prefill_price", "picoseconds of a unit of cost"),
    ("decode_price", "picoseconds of a unit of cost of decodes"),
    ("saturating", "decoding CTAs that saturate memory"),
    ("shortest_cut", "key tiles of the shortest prefill that is cut"),
    ("decode_claim", "least cost of a shared list of decodes"),
    ("cached_keys", "keys of one head that the cache holds; 0: all"),
)
# Behind SITE where tiles are assigned the longest first; lines and slices have no meaning then.
_SECTIONS = ("section_keys", "keys of one head that the cache holds; 0: no sections")
LIST_SITE = (ROLE_SITE[0], _SECTIONS)  # the first is `active_ctas`
# Behind ROLE_SITE where some prefills are dealt: costs by which they are, and when.
DEAL_SITE = (
    _SECTIONS,
    ("deal_cost_fixed", "cost of an item without keys"),
    ("deal_cost_per_tile", "cost of a key tile"),
    ("deal_cost_grain", "key tiles of the shortest piece"),
    ("deal_cost_partial", "cost of a partial result"),
    ("deals_beside_decodes", "1: some prefills beside decodes may be dealt; 0: none"),
)


@dataclass(frozen=True)
class PlannerSpec(KernelSpec):
    """The planner of one mask.

    Attributes:
        variant: its mask and that mask's inputs count.
        has_roles: its plans have two roles.
        threads: of the team of a device; not in the source, and neither is the next.
        scratch: bytes that a team works in.
        longest_first: it assigns tiles the longest first, which hosts alone do; of two roles, where
            that is better. Else it cuts lines of items by Stream-K.
    """

    variant: TracedVariant
    has_roles: bool = False
    threads: int = 128
    scratch: int = 0
    longest_first: bool = False

    kind = "planner"
    entry = "warploom_planner"
    RESERVED: ClassVar[int] = 528  # bytes of shared memory that `PlannerTeam` takes

    @property
    def name(self) -> str:
        """Readable, and the same for variants that differ elsewhere only."""
        kind = self._header.rpartition("/")[2]
        if _mask(self.variant) is None:
            return f"{kind}_all_visible"
        text = KernelSource("", self.variant_struct("cpp"), "cpp").code
        named = re.sub(r"\W+", "_", self.variant.name).strip("_")
        return f"{kind}_{named}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def fields(self) -> tuple[ParamField, ...]:
        fields = [ParamField("const int*", name, "of plan()") for name in INPUTS]
        fields += [ParamField("int*", name, "of the plan") for name in OUTPUTS]
        fields.append(ParamField("int*", "votes", "of the teams of a device, or null"))
        numbers = (*BATCH, *self.site)
        fields += [ParamField("int", name, meaning) for name, meaning in numbers]
        read = _read(self.variant, "scalar", "load")
        mask = replace(
            self.variant,
            scalars=tuple(field for field in self.variant.scalars if field.name in read),
            tensors=tuple(field for field in self.variant.tensors if field.name in read),
        )
        return ordered([*fields, *input_fields(mask)])

    @property
    def site(self) -> tuple[tuple[str, str], ...]:
        """Numbers of a kernel, in order."""
        if not self.has_roles:
            return (*SITE, *LIST_SITE) if self.longest_first else SITE
        return (*SITE, *ROLE_SITE, *(DEAL_SITE if self.longest_first else ()))

    @property
    def _header(self) -> str:
        """Which file has the algorithm."""
        if self.longest_first:
            return f"host_planner/{'dealing_role' if self.has_roles else 'longest_first'}_planner"
        return "planner/role_planner" if self.has_roles else "planner/planner"

    @property
    def labels(self) -> Mapping[str, str]:
        return {"kind": self.kind, "variant": self.variant.name}

    @property
    def about(self) -> str:
        return ""  # variants share it

    def context(self) -> Mapping[str, Any]:
        reads_kv_head = str("kv_head" in _read(self.variant, "var")).lower()
        words = self._header.rpartition("/")[2].split("_")
        return {
            "has_roles": str(self.has_roles).lower(),
            "reads_kv_head": reads_kv_head,
            "planner": self._header,
            "reserved": self.RESERVED,
            "planner_class": "".join(word.capitalize() for word in words),
        }

    def variant_struct(self, language: Language) -> str:
        mask = _mask(self.variant)
        if mask is None:
            return "struct Variant : IdentityVariant<Params> {};"
        tensors = {field.name: field for field in self.variant.tensors}
        body = "  static constexpr bool kHasLogitsMask = true;\n" + tile_functions(mask, tensors)
        return f"struct Variant : IdentityVariant<Params> {{\n{body}\n}};"

    def launch(self, arch: Arch) -> LaunchShape:
        return LaunchShape(self.threads, self.RESERVED + self.scratch, 1)


def _mask(variant: TracedVariant) -> Node | None:
    return variant.hooks.get("logits_mask")


def _read(variant: TracedVariant, *ops: str) -> frozenset[str]:
    """Inputs or positions that the mask reads, by the operations that read them."""
    mask = _mask(variant)
    nodes = [] if mask is None else walk(mask)
    return frozenset(str(found.attr) for found in nodes if found.op in ops)

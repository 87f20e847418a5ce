"""What nodes of an FX graph do, as far as prefetching asks: communicate, read memory, view it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

_MATMULS = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "mv", "addmv", "_scaled_mm")
) | {"mkldnn::_linear_pointwise"}  # fmt: skip
_ATTENTION = ("aten::_scaled_dot_product", "aten::scaled_dot_product", "warploom::attention")
RUN = "warploom::run"  # whose pages a plan knows
_WAITS = ("wait_tensor",)
_DISTRIBUTED = ("_c10d_functional::", "_c10d_functional_autograd::")

# Views of all elements, in another order or shape; and views of some.
_WHOLE = frozenset(
    f"aten::{name}"
    for name in ("permute", "t", "transpose", "view", "_unsafe_view", "reshape", "unsqueeze",
                 "squeeze", "detach", "alias", "expand", "numpy_T")
)  # fmt: skip
_PART = frozenset(("aten::select", "aten::slice", "aten::narrow"))

_FUNCTIONS: dict[Callable[..., Any], str] = {
    torch.mm: "aten::mm",
    torch.bmm: "aten::bmm",
    torch.addmm: "aten::addmm",
    torch.baddbmm: "aten::baddbmm",
    torch.matmul: "aten::matmul",
    operator.matmul: "aten::matmul",
    torch.nn.functional.linear: "aten::linear",
    torch.nn.functional.scaled_dot_product_attention: "aten::scaled_dot_product_attention",
    torch.permute: "aten::permute",
    torch.transpose: "aten::transpose",
    torch.t: "aten::t",
    torch.reshape: "aten::reshape",
}


def name_of(node: Node) -> str:
    """The operator of a node as its schema names it, such as "aten::mm"; "" if it is none."""
    target = node.target
    if node.op == "call_method":
        return f"aten::{target}"
    if node.op != "call_function":
        return ""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return _FUNCTIONS.get(target, "") if callable(target) else ""


def is_launch(node: Node) -> bool:
    """A collective of torch that runs on a stream of its own until it is waited for."""
    name = name_of(node)
    return name.startswith(_DISTRIBUTED) and name.rpartition("::")[2] not in _WAITS


def is_reader(node: Node, more: frozenset[str]) -> bool:
    """A product or attention, which read weights or keys; or one of these operators."""
    name = name_of(node)
    return name in _MATMULS or name.startswith(_ATTENTION) or name in more


def linear_of(node: Node, module: GraphModule | None) -> torch.nn.Linear | None:
    """The layer that a node of a symbolic trace calls, if it is a linear one."""
    if node.op != "call_module" or module is None:
        return None
    found = module.get_submodule(str(node.target))
    return found if isinstance(found, torch.nn.Linear) else None


def source_of(node: Node) -> Node:
    """The node whose elements a view shows, all of them."""
    while name_of(node) in _WHOLE and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def is_stored(node: Node) -> bool:
    """Memory that is there before the graph runs, or a view of it that needs nothing else."""
    while name_of(node) in _WHOLE | _PART and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.op in ("placeholder", "get_attr")


def size_of(node: Node, module: GraphModule | None, device: torch.device | None) -> int | None:
    """Bytes of a tensor that can be prefetched, if they are known before the graph runs.

    Args:
        node: what makes it.
        module: whose graph it is, for attributes.
        device: where it must be, if that is known.
    """
    tensor = tensor_of(node, module)
    if tensor is None or (device is not None and tensor.device != device):
        return None
    return dense_size(tensor)


def moved_bytes(collective: Node, module: GraphModule | None) -> int:
    """Of the largest tensor that a collective takes or makes; 0 if that is not known yet."""
    nodes = (collective, *collective.all_input_nodes)
    return max(size_of(node, module, None) or 0 for node in nodes)


def dense_size(tensor: torch.Tensor) -> int | None:
    """Bytes of a tensor; None if it has gaps, no elements, or sizes that vary."""
    if not all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride())):
        return None
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0 or span != tensor.numel():
        return None
    return int(tensor.numel() * tensor.element_size())


def tensor_of(node: Node, module: GraphModule | None) -> torch.Tensor | None:
    """The tensor, or the fake that a compiler has put in its place."""
    for key in ("val", "example_value"):
        if isinstance(node.meta.get(key), torch.Tensor):
            found: torch.Tensor = node.meta[key]
            return found
    if node.op != "get_attr" or module is None:
        return None
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, torch.Tensor) else None

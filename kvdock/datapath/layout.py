"""Describes an engine's paged KV by strides. A named format is a way to build such a description.

A plane is the K or the V (or the one latent) of one layer; its blocks are `block_stride` bytes apart and consist
of equal runs. Slots hold planes in one canonical order: layer by layer, K before V. So formats with the same order of
elements inside a block ("NHD": token, head, element; "HND": head, token, element) have equal slot bytes: a part that
was gathered from one can be scattered into another.

Tensors are duck-typed (data_ptr, shape, stride, element_size): torch is never imported here. Strides are
read from the tensors, so views and padding work as long as the runs inside a block are regular.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeAlias

from kvdock import _core
from kvdock.datapath.errors import layout_error


class PagedTensor(Protocol):
    """The attributes of a torch tensor that copies use; strides in elements."""

    @property
    def shape(self) -> Sequence[int]:
        """Elements along each dimension."""
    def data_ptr(self) -> int:
        """The address of the first element."""
    def stride(self) -> Sequence[int]:
        """Elements between two neighbours along each dimension."""
    def element_size(self) -> int:
        """Bytes of an element."""


Tensors: TypeAlias = PagedTensor | Sequence["Tensors"]
Plane: TypeAlias = tuple[int, int, int, int, int]
"""(base address, block stride, run bytes, run count, run stride). Strides are in bytes."""
Index: TypeAlias = dict[str, int]
"""Index along each known dimension of NL (layer) and TWO (0: K, 1: V)."""


@dataclass(frozen=True)
class PagedLayout:
    """Where an engine's paged KV is in memory. It holds the tensors, so the addresses stay valid while it exists."""

    name: str
    token_order: str
    """'NHD', 'HND', or 'ND' for layouts without heads, which have only one order."""
    planes: tuple[Plane, ...]
    num_blocks: int
    block_tokens: int
    tensors: Tensors = field(repr=False)
    core: _core.PagedLayout = field(repr=False)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes."""
        return self.core.block_bytes

    def part_bytes(self, blocks: int) -> int:
        """Bytes of a raw part (a slot) of that many blocks."""
        return self.block_bytes * blocks

    def with_block_tokens(self, tokens: int) -> PagedLayout:
        """The same blocks, where each holds the KV of that many tokens in whatever order."""
        core = _core.PagedLayout(self.planes, num_blocks=self.num_blocks, block_tokens=tokens)
        return replace(self, block_tokens=tokens, core=core)

    def packed_shape(self, blocks: int, marks: int | None = None, units: int | None = None) -> _core.PackedShape:
        """The shape of packed parts of that many blocks, with that reserve of marks and so many units of spill
        (docs/understand/packing.md); None: what suits most KV. Raises CopyError."""
        return _core.packed_shape(self.core, blocks=blocks, marks=marks, units=units)

    @property
    def is_bf16(self) -> bool:
        """Whether all tensors have elements of this type, which packing is made for."""
        return _all_bf16(self.tensors)


def _all_bf16(tensors: Tensors) -> bool:
    if isinstance(tensors, Sequence):
        return all(_all_bf16(one) for one in tensors)
    return str(getattr(tensors, "dtype", "")).endswith("bfloat16")


@dataclass(frozen=True)
class NamedFormat:
    """A format, parsed from its name: `A_X_B_C` is a list over A of tensors with dimensions B and C, outermost first.

    NB blocks, NL layers, TWO K and V, NBBS token slots of all blocks, BS tokens of a block, NH heads, HS elements of a
    head, ONE a dimension of size one.
    """

    nesting: tuple[str, ...]
    dims: tuple[str, ...]

    @classmethod
    def of(cls, name: str) -> NamedFormat:
        """The format of that name."""
        *nesting, dims = name.split("_X_")
        return cls(tuple(nesting), tuple(dims.split("_")))

    @property
    def is_latent(self) -> bool:
        """Whether a layer has one plane, for multi-head latent attention, instead of K and V."""
        return "TWO" not in self.nesting + self.dims

    @property
    def order(self) -> str:
        """The value of PagedLayout.token_order."""
        if "NH" not in self.dims:
            return "ND"
        return "HND" if "BS" in self.dims and self.dims.index("NH") < self.dims.index("BS") else "NHD"


FORMATS: Final[Mapping[str, NamedFormat]] = {name: NamedFormat.of(name) for name in (
    "NB_NL_TWO_BS_NH_HS", "NB_NL_TWO_NH_BS_HS", "NL_X_TWO_NB_BS_NH_HS", "NL_X_TWO_NB_NH_BS_HS", "NL_X_NB_TWO_BS_NH_HS",
    "NL_X_NB_TWO_NH_BS_HS", "NL_X_NB_BS_HS", "TWO_X_NL_X_NBBS_NH_HS", "NL_X_NBBS_ONE_HS",
)}


def paged_layout(name: str, tensors: Tensors, *, block_tokens: int) -> PagedLayout:
    """Describes `tensors` (one, or lists nested as `name` says) of format `name`, one of FORMATS.

    Raises LayoutError for an unknown name, a wrong nesting, rank or size, unequal shapes or element sizes, strides
    without regular runs inside a block, and addresses or strides that are no multiple of 16 bytes.
    """
    form = FORMATS.get(name)
    if form is None:
        raise layout_error("format", found=name, wanted=f"one of {', '.join(FORMATS)}")
    if block_tokens < 1:
        raise layout_error("block_tokens", found=block_tokens, wanted="at least 1")
    leaves = _leaves(tensors, form.nesting, {})
    _check_alike([tensor for _, tensor in leaves], form, block_tokens)
    described: dict[tuple[int, int], Plane] = {}
    for outer, tensor in leaves:
        for inner, plane in _planes_of(tensor, form, block_tokens):
            index = {**outer, **inner}
            described[index.get("NL", 0), index.get("TWO", 0)] = plane
    # Layers that share their memory (cross-layer KV sharing) are one plane, copied once.
    planes = tuple(dict.fromkeys(described[at] for at in sorted(described)))
    num_blocks = _num_blocks(leaves[0][1], form, block_tokens)
    core = _core.PagedLayout(planes, num_blocks=num_blocks, block_tokens=block_tokens)
    return PagedLayout(name, form.order, planes, num_blocks, block_tokens, tensors, core)


def _leaves(tensors: Tensors, nesting: tuple[str, ...], outer: Index) -> list[tuple[Index, PagedTensor]]:
    """Every tensor with its index in the lists around it."""
    if not nesting:
        if isinstance(tensors, Sequence):
            raise layout_error("nesting", found=type(tensors).__name__, wanted="a tensor")
        return [(outer, tensors)]
    wanted = "K and V" if nesting[0] == "TWO" else "at least one layer"
    if not isinstance(tensors, Sequence):
        raise layout_error("nesting", found="a tensor", wanted=f"a list of {wanted}")
    if not tensors or (nesting[0] == "TWO" and len(tensors) != 2):
        raise layout_error("list length", found=len(tensors), wanted=wanted)
    found: list[tuple[Index, PagedTensor]] = []
    for index, item in enumerate(tensors):
        found += _leaves(item, nesting[1:], {**outer, nesting[0]: index})
    return found


def _check_alike(tensors: Sequence[PagedTensor], form: NamedFormat, block_tokens: int) -> None:
    first = tensors[0]
    rank = len(form.dims)
    sizes = {"TWO": 2, "ONE": 1, "BS": block_tokens}
    if first.element_size() not in (1, 2, 4):
        raise layout_error("element size (bytes)", found=first.element_size(), wanted="1, 2 or 4")
    for index, tensor in enumerate(tensors):
        shape = tuple(tensor.shape)
        if len(shape) != rank:
            raise layout_error(f"rank of tensor {index}", found=len(shape), wanted=rank)
        if tensor.element_size() != first.element_size():
            raise layout_error(
                f"element size of tensor {index} (bytes)", found=tensor.element_size(), wanted=first.element_size()
            )
        if shape != tuple(first.shape):
            raise layout_error(f"shape of tensor {index}", found=shape, wanted=tuple(first.shape))
        for dim, size in zip(form.dims, shape, strict=True):
            if size != sizes.get(dim, size) or size < 1:
                wanted = sizes.get(dim, "at least 1")
                raise layout_error(f"size of dimension {form.dims.index(dim)}", found=size, wanted=wanted)
    _num_blocks(first, form, block_tokens)


def _num_blocks(tensor: PagedTensor, form: NamedFormat, block_tokens: int) -> int:
    if "NB" in form.dims:
        return tensor.shape[form.dims.index("NB")]
    slots = tensor.shape[form.dims.index("NBBS")]
    if slots % block_tokens:
        raise layout_error("token slots", found=slots, wanted=f"a multiple of {block_tokens}")
    return slots // block_tokens


def _planes_of(tensor: PagedTensor, form: NamedFormat, block_tokens: int) -> list[tuple[Index, Plane]]:
    """The planes inside one tensor, each with its index along the NL and TWO dimensions."""
    element = tensor.element_size()
    size = dict(zip(form.dims, tensor.shape, strict=True))
    step = {dim: stride * element for dim, stride in zip(form.dims, tensor.stride(), strict=True)}
    if "NBBS" in size:  # blocks are block_tokens neighbouring slots
        block_stride = step["NBBS"] * block_tokens
        inside = [(block_tokens, step["NBBS"])]
    else:
        block_stride = step["NB"]
        inside = []
    inside += [(size[dim], step[dim]) for dim in form.dims if dim in ("BS", "NH", "HS", "ONE")]
    run_bytes, run_count, run_stride = _runs(inside, element)
    planes: list[tuple[Index, Plane]] = []
    for layer in range(size.get("NL", 1)):
        for kv in range(size.get("TWO", 1)):
            base = tensor.data_ptr() + layer * step.get("NL", 0) + kv * step.get("TWO", 0)
            inner = {dim: index for dim, index in (("NL", layer), ("TWO", kv)) if dim in size}
            planes.append((inner, (base, block_stride, run_bytes, run_count, run_stride)))
    return planes


def _runs(inside: Sequence[tuple[int, int]], element_bytes: int) -> tuple[int, int, int]:
    """(run bytes, run count, run stride) of dimensions (size, stride in bytes), outermost first.

    Dimensions that continue each other are merged; the rest must be one run, or runs at one stride.
    """
    merged: list[tuple[int, int]] = [(1, element_bytes)]  # innermost first: (count, stride)
    for count, stride in reversed(inside):
        if count == 1:
            continue
        inner_count, inner_stride = merged[-1]
        if stride == inner_count * inner_stride:
            merged[-1] = (inner_count * count, inner_stride)
        else:
            merged.append((count, stride))
    scattered = merged[0] == (1, element_bytes) and len(merged) > 1  # single elements that are not adjacent
    if len(merged) > 2 or scattered:
        found = f"strides {[stride for _, stride in inside]} bytes for sizes {[count for count, _ in inside]}"
        raise layout_error("runs inside a block", found=found, wanted="contiguous elements, in runs at one stride")
    run_bytes = merged[0][0] * element_bytes
    return (run_bytes, *merged[1]) if len(merged) == 2 else (run_bytes, 1, run_bytes)

"""Which KV groups of an engine are packed (docs/understand/packing.md): that is part of the manifest, so engines that
pack share no chunks with those that do not."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from kvdock import _core
from kvdock.connectors.errors import LayoutMismatchError, NotSupportedError
from kvdock.connectors.settings import PACK
from kvdock.datapath.devices import Device
from kvdock.datapath.layout import PagedLayout
from kvdock.datapath.tuning import packing_pays
from kvdock.protocol.schemas import Group, Manifest, Packed

MARKS: int | None = None
"""The reserve of marks of a tile, and `UNITS` of a part's spill. None: what suits the models that were measured."""
UNITS: int | None = None


def with_packing(manifest: Manifest, layouts: Sequence[PagedLayout], pack: str, device: Device) -> Manifest:
    """The manifest of an engine whose KV groups have these layouts, for a setting `pack`: "on" packs each group that
    can be packed, "auto" only where that is measured to pay. Raises NotSupportedError."""
    if pack not in PACK:
        raise NotSupportedError(f"pack is {pack!r}, and one of {', '.join(PACK)} is wanted.")
    if pack == "off" or (pack == "auto" and not packing_pays(device.cuda is not None)):
        return manifest
    groups = tuple(
        replace(group, packed=_packed(group, layout, manifest.chunk_tokens // layout.block_tokens))
        for group, layout in zip(manifest.groups, layouts, strict=True)
    )
    return replace(manifest, groups=groups)


def _packed(group: Group, layout: PagedLayout, blocks: int) -> Packed | UnsetType:
    """UNSET: elements of another type than bf16, or parts too small to become smaller."""
    planes = [run_bytes * run_count * blocks for _, _, run_bytes, run_count, _ in layout.planes]
    if not layout.is_bf16 or min(planes) < _core.TILE_BYTES:
        return UNSET
    shape = layout.packed_shape(blocks, MARKS, UNITS)
    if shape.packed_bytes >= group.part_bytes:
        return UNSET
    return Packed(planes=len(planes), marks=shape.marks, units=shape.units, bytes=shape.packed_bytes)


def shape_of(group: Group, layout: PagedLayout, blocks: int) -> _core.PackedShape | None:
    """The shape of a group's packed parts; None: the group is not packed. Raises LayoutMismatchError if the manifest
    has another one."""
    if group.packed is UNSET:
        return None
    shape = layout.packed_shape(blocks, group.packed.marks, group.packed.units)
    found, wanted = (len(layout.planes), shape.packed_bytes), (group.packed.planes, group.packed.bytes)
    if found != wanted:
        raise LayoutMismatchError(
            f"planes and bytes of packed parts: found {found}, wanted {wanted} as the manifest says"
        )
    return shape

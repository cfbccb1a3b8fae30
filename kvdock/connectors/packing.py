"""Which KV groups of an engine are packed (docs/understand/packing.md): that is part of the manifest, so engines that
pack share no chunks with those that do not.

`pack: auto` packs where that is measured to pay (kvdock/datapath/pack_rates.py), but for models whose first parts
showed that they do not become smaller (FirstParts).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from kvdock import _core
from kvdock.connectors.errors import LayoutMismatchError, NotSupportedError
from kvdock.connectors.settings import PACK
from kvdock.datapath.devices import Device
from kvdock.datapath.layout import PagedLayout
from kvdock.datapath.pack_rates import pack_rates
from kvdock.datapath.tuning import cache_directory
from kvdock.protocol.schemas import Group, Manifest, Packed

log = logging.getLogger("kvdock.connector")

MARKS: int | None = None
"""The reserve of marks of a tile, and `UNITS` of a part's spill. None: what suits the models that were measured."""
UNITS: int | None = None

FIRST_PARTS, MOST_RAW = 64, 0.25
"""A model does not pack if more than this share of the first parts that an engine stores could not be packed."""


def with_packing(manifest: Manifest, layouts: Sequence[PagedLayout], pack: str, device: Device) -> Manifest:
    """The manifest of an engine whose KV groups have these layouts, for a setting `pack`: "on" packs each group that
    can be packed, "auto" only where that is measured to pay. Raises NotSupportedError."""
    if pack not in PACK:
        raise NotSupportedError(f"pack is {pack!r}, and one of {', '.join(PACK)} is wanted.")
    if pack == "off":
        return manifest
    groups = tuple(
        replace(group, packed=_packed(group, layout, manifest.chunk_tokens // layout.block_tokens))
        for group, layout in zip(manifest.groups, layouts, strict=True)
    )
    packed = replace(manifest, groups=groups)
    if packed == manifest or (pack == "auto" and not _pays(manifest, device)):
        return manifest
    return packed


def _pays(manifest: Manifest, device: Device) -> bool:
    """Says why in the log. Ranks find the same files, or none of them packs."""
    rates = pack_rates(device.cuda)
    if rates is None:
        log.info("KV is not packed: what it costs is not known")
        return False
    if not rates.pays:
        log.info("KV is not packed: it does not pay here; %s", rates.describe())
        return False
    if _raw_note(manifest).exists():
        log.info("KV is not packed: earlier parts of this model did not become smaller (%s)", _raw_note(manifest))
        return False
    log.info("KV is packed; %s", rates.describe())
    return True


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


class FirstParts:
    """Counts which of the first parts of an engine could not be packed. If they are many, a file says so for `auto` the
    next time: the engine's manifest stays what it is."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest, self._parts, self._raw = manifest, 0, 0

    def count(self, groups: Iterable[int], raw: int) -> None:
        """`groups`: of each part of a store; `raw`: how many parts could not be packed."""
        if self._parts >= FIRST_PARTS:
            return
        self._parts += sum(self._manifest.groups[group].packed is not UNSET for group in groups)
        self._raw += raw
        if self._parts < FIRST_PARTS or self._raw <= MOST_RAW * self._parts:
            return
        log.warning(
            "KV of %s does not pack: %d of the first %d parts are stored raw. Set pack to off: with auto, engines that "
            "start from now on do not pack it", self._manifest.model, self._raw, self._parts,
        )
        self._tell()

    def _tell(self) -> None:
        note = _raw_note(self._manifest)
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps({"model": self._manifest.model, "parts": self._parts, "raw": self._raw}) + "\n")
        except OSError as error:
            log.warning("that KV does not pack cannot be noted in %s: %s", note.parent, error)


def models_that_do_not_pack(cache_dir: Path | None = None) -> list[str]:
    """As engines of this user have found."""
    directory, found = cache_dir if cache_dir is not None else cache_directory(), []
    for note in sorted(directory.glob("raw-*.json")):
        try:
            said = json.loads(note.read_text())
            found.append(f"{said['model']} ({said['raw']} of {said['parts']} parts)")
        except (OSError, ValueError, KeyError, TypeError):
            found.append(str(note))
    return found


def _raw_note(manifest: Manifest) -> Path:
    """The file that says of the engine's KV that it does not pack."""
    raw = replace(manifest, groups=tuple(replace(group, packed=UNSET) for group in manifest.groups))
    return cache_directory() / f"raw-{hashlib.sha256(msgspec.json.encode(raw)).hexdigest()[:16]}.json"

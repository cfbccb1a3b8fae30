"""Gather and scatter on a GPU, bitwise against a slow reference: formats, types, skips, ways, places, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bytes_helpers import DTYPES, FORMATS, GUARD, Paged, Shape, Slots, kv_of
from cuda_helpers import DIRECT, STAGED, WAYS, cuda_copier, needs_gpu, slots_in

from kvdock import _core
from kvdock.datapath.copy import CpuCopier, PartCopy, PartResult
from kvdock.datapath.cuda import CopyTuning, CudaCopier
from kvdock.datapath.errors import CopierClosed, CopyError, CudaError, NoCuda
from kvdock.datapath.layout import PagedLayout, paged_layout
from kvdock.shm.checksum import checksum

pytestmark = needs_gpu

# Heads of 256 bytes and more, as attention has; runs inside a block differ by format.
SHAPE = Shape(layers=3, blocks=9, tokens=4, heads=2, head_size=256)
LISTS = {"shuffled": [5, 0, 3, 8, 6], "single": [7], "repeated": [4, 4, 2, 4], "empty": []}


def fresh_seed() -> int:
    return int(np.random.default_rng().integers(1 << 31))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_type_moves_bitwise_with_every_skip(name: str, dtype: torch.dtype) -> None:
    paged = Paged(name, dtype, SHAPE, device="cuda")
    paged.fill_random(fresh_seed())
    lists = list(LISTS.values())
    wanted = [paged.reference(ids) for ids in lists]
    sums = [checksum(part) for part in wanted]
    for way, tuning in WAYS.items():
        for kind in ("host", "device"):
            with slots_in(kind, len(lists), paged.layout.part_bytes(5)) as slots:
                with cuda_copier(paged.layout, tuning) as copier:
                    parts = [PartCopy(slots.address(i), ids) for i, ids in enumerate(lists)]
                    found = [result.checksum for result in copier.gather(parts).result()]
                for index, part in enumerate(wanted):
                    assert slots.read(index)[: len(part)] == part, (way, kind, index)
                assert found == sums, (way, kind)
                assert slots.guards_intact(len(lists))
                if way == "staged" or kind == "host":
                    check_scatter(name, dtype, slots, wanted, sums, tuning)


def check_scatter(
    name: str, dtype: torch.dtype, slots: Slots, contents: list[bytes], sums: list[int], tuning: CopyTuning
) -> None:
    """Into other blocks than the gather's. Repeated ids are left out: which of two contents wins is nobody's word."""
    into = [[2, 7, 1, 4, 8], [6], [], []]
    for skips in ((0, 0), (1, 0), (4, 1), (5, 0)):
        target = Paged(name, dtype, SHAPE, device="cuda")
        target.fill_guard()
        with cuda_copier(target.layout, tuning) as copier:
            parts = [PartCopy(slots.address(i), into[i], skips[i], sums[i]) for i in range(2)]
            assert [result.ok for result in copier.scatter(parts).result()] == [True, True]
        size = len(target.block_bytes(0, 0, 0))
        for (layer, kv, block), found in target.blocks_now().items():
            wanted = bytes([GUARD]) * size
            for part in range(2):
                if block in into[part] and (position := into[part].index(block)) >= skips[part]:
                    start = ((layer * kv_of(name) + kv) * len(into[part]) + position) * size
                    wanted = contents[part][start : start + size]
            assert found == wanted, (skips, layer, kv, block)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 256), (3, 2, 136), (16, 8, 128), (256, 1, 576)])
def test_words_that_name_their_place_arrive_there(way: str, tokens: int, heads: int, size: int) -> None:
    """Each 8-byte word says its plane, block and offset, so a word in the wrong position shows where it came from."""
    blocks, layers, part = 40, 5, 11
    shape = (blocks, 2, tokens, heads, size)
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    layout = paged_layout("NL_X_NB_TWO_BS_NH_HS", tensors, block_tokens=tokens)
    words = tokens * heads * size * 2 // 8
    for layer, tensor in enumerate(tensors):
        tensor.view(torch.int64).view(blocks, 2, words).copy_(_names(layer, blocks, words))
    ids = torch.randperm(blocks)[: 3 * part].view(3, part)
    with slots_in("host", 3, layout.part_bytes(part)) as slots, cuda_copier(layout, WAYS[way]) as copier:
        stored = copier.gather([PartCopy(slots.address(i), ids[i]) for i in range(3)]).result()
        for i in range(3):
            found = torch.frombuffer(bytearray(slots.read(i)), dtype=torch.int64).view(layers, 2, part, words)
            for layer in range(layers):
                assert torch.equal(found[layer], _names(layer, blocks, words).cpu()[ids[i]].transpose(0, 1)), (i, layer)
        for tensor in tensors:
            tensor.view(torch.uint8).fill_(GUARD)
        torch.cuda.synchronize()
        parts = [PartCopy(slots.address(i), ids[i], i, stored[i].checksum) for i in range(3)]
        assert all(result.ok for result in copier.scatter(parts).result())
    written = torch.cat([ids[i][i:] for i in range(3)])
    for layer, tensor in enumerate(tensors):
        wanted = torch.full((blocks, 2, words), int.from_bytes(bytes([GUARD]) * 8, "little"), device="cuda")
        wanted[written] = _names(layer, blocks, words)[written]
        assert torch.equal(tensor.view(torch.int64).view(blocks, 2, words), wanted), layer


def _names(layer: int, blocks: int, words: int) -> torch.Tensor:
    """int64 [blocks, 2, words]: layer, plane, block and offset in one number."""
    block = torch.arange(blocks, device="cuda").view(-1, 1, 1) << 32
    plane = torch.arange(2, device="cuda").view(1, -1, 1) << 30
    return (layer << 48) + block + plane + torch.arange(words, device="cuda")


@pytest.mark.parametrize("way", WAYS)
def test_a_flipped_byte_a_slot_stored_again_and_a_wrong_slot_are_each_reported(way: str) -> None:
    paged = Paged("NL_X_NB_TWO_BS_NH_HS", torch.bfloat16, SHAPE, device="cuda")
    paged.fill_random(fresh_seed())
    size = paged.layout.part_bytes(4)
    with slots_in("host", 3, size) as slots, cuda_copier(paged.layout, WAYS[way]) as copier:
        parts = [PartCopy(slots.address(i), ids) for i, ids in enumerate(([5, 0, 3, 6], [1, 2, 4, 7]))]
        first, second = (result.checksum for result in copier.gather(parts).result())
        clean = slots.read(0)
        last_plane = size - paged.layout.block_bytes * 4 // 6
        for at, skip in ((0, 0), (size - 1, 0), (size // 2, 0), (0, 1), (last_plane, 2), (1, 4)):
            slots.write(0, clean[:at] + bytes([clean[at] ^ 0x10]) + clean[at + 1 :])
            (bad,) = copier.scatter([PartCopy(slots.address(0), [5, 0, 3, 6], skip, first)]).result()
            assert not bad.ok and bad.checksum != first, (at, skip)
        slots.write(0, clean)
        moved = [PartCopy(slots.address(1), [5, 0, 3, 6], 0, first), PartCopy(slots.address(0), [1, 2, 4, 7], 0, first)]
        assert [result.ok for result in copier.scatter(moved).result()] == [False, True]
        assert copier.gather([PartCopy(slots.address(0), [1, 2, 4, 8])]).result()[0].checksum != second
        assert not copier.scatter([PartCopy(slots.address(0), [5, 0, 3, 6], 0, first)]).result()[0].ok, "stored again"
        swapped = clean[16:32] + clean[:16] + clean[32:]
        slots.write(0, swapped)
        assert not copier.scatter([PartCopy(slots.address(0), [5, 0, 3, 6], 0, first)]).result()[0].ok


def test_a_million_block_ids_are_split_not_refused() -> None:
    blocks, each = 1 << 20, 400_000
    tensor = torch.randint(0, 256, (blocks, 1, 256), dtype=torch.uint8, device="cuda")
    layout = paged_layout("NL_X_NB_BS_HS", [tensor], block_tokens=1)
    ids = torch.randperm(blocks)[: 2 * each].view(2, each)
    with slots_in("host", 3, 256 * each) as slots, cuda_copier(layout, CopyTuning()) as copier:
        lists = [ids[0], ids[1], ids[0].flip(0)]
        found = copier.gather([PartCopy(slots.address(i), one) for i, one in enumerate(lists)]).result()
        for i, one in enumerate(lists):
            wanted = tensor[one.cuda()].cpu().numpy().tobytes()
            assert slots.read(i) == wanted and found[i].checksum == checksum(wanted)
        tensor.fill_(GUARD)
        torch.cuda.synchronize()
        parts = [PartCopy(slots.address(i), lists[i], 7, found[i].checksum) for i in range(2)]
        assert all(result.ok for result in copier.scatter(parts).result())
        for i in range(2):
            assert tensor[lists[i][7:].cuda()].cpu().numpy().tobytes() == slots.read(i)[7 * 256 :]
            assert bool((tensor[lists[i][:7].cuda()] == GUARD).all())
        with pytest.raises(CopyError, match=r"part 0: blocks: found 600000, wanted .* at most 500000"):
            copier.gather([PartCopy(slots.address(0), range(600_000))])


def test_one_bad_argument_stops_the_whole_call_before_any_byte_moves() -> None:
    paged = Paged("NL_X_NB_BS_HS", torch.int8, SHAPE, device="cuda")
    paged.fill_guard()
    before = paged.blocks_now()
    size = paged.layout.part_bytes(2)
    good_ids, sums = [2, 3], checksum(bytes(size))
    with slots_in("host", 2, size) as slots, cuda_copier(paged.layout) as copier:
        slots.write(0, bytes(size))
        somewhere = torch.empty(size + 16, dtype=torch.uint8)
        for bad, message in [
            (PartCopy(slots.address(1), [0, 9], 0, 1), "part 1: block id: found 9, wanted 0..8"),
            (PartCopy(slots.address(1), [0, -1], 0, 1), "part 1: block id: found -1"),
            (PartCopy(slots.address(1), [0, 1], 3, 1), "part 1: skipped blocks: found 3, wanted at most the part's 2"),
            (PartCopy(slots.address(1) + 8, [0, 1], 0, 1), "part 1: slot address: found .*, wanted a multiple of 16"),
            (PartCopy(-somewhere.data_ptr() % 16 + somewhere.data_ptr(), [0, 1], 0, 1), "part 1: slot"),
            (PartCopy(slots.address(1), [0, 1], 0, None), "part 1: checksum: found None"),
        ]:
            with pytest.raises(CopyError, match=message):
                copier.scatter([PartCopy(slots.address(0), good_ids, 0, sums), bad])
        torch.cuda.synchronize()
        assert paged.blocks_now() == before
        assert copier.scatter([PartCopy(slots.address(0), good_ids, 0, sums)]).result()[0].ok, "and it goes on"


def test_a_part_longer_than_its_layout_was_added_for_is_refused() -> None:
    paged = Paged("NL_X_NB_BS_HS", torch.int8, SHAPE, device="cuda")
    paged.fill_random(fresh_seed())
    with slots_in("host", 1, paged.layout.part_bytes(3)) as slots:
        copier = CudaCopier(paged.layout, device=0, part_blocks=2, tuning=STAGED)
        assert copier.gather([PartCopy(slots.address(0), [1, 2])]).result()[0].checksum == checksum(slots.read(0)[
            : paged.layout.part_bytes(2)
        ])
        with pytest.raises(CopyError, match="part 0: blocks: found 3, wanted at most the layout's 2"):
            copier.gather([PartCopy(slots.address(0), [1, 2, 3])])
        copier.close()


def test_blocks_that_are_not_on_the_device_are_refused_when_the_copier_is_made() -> None:
    for tensors in ([torch.empty(8, 4, 64)], [torch.empty(8, 4, 64, device="cuda"), torch.empty(8, 4, 64)]):
        with pytest.raises(CudaError, match="wanted memory of device 0"):
            CudaCopier(paged_layout("NL_X_NB_BS_HS", tensors, block_tokens=4), device=0, tuning=STAGED)
    with pytest.raises(NoCuda, match='device "cuda:99" does not exist'):
        CudaCopier(Paged("NL_X_NB_BS_HS", torch.int8, SHAPE, device="cuda").layout, device=99)


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        (CopyTuning(buffers=0), "staging buffers: found 0, wanted 1..8"),
        (CopyTuning(piece_bytes=12345), "piece_bytes: found 12345"),
        (CopyTuning(load_ctas=0), "thread blocks: found 0"),
    ],
)
def test_a_tuning_that_cannot_be_is_refused(tuning: CopyTuning, message: str) -> None:
    with pytest.raises(CopyError, match=message):
        CudaCopier(Paged("NL_X_NB_BS_HS", torch.int8, SHAPE, device="cuda").layout, device=0, tuning=tuning)


def test_a_closed_copier_takes_nothing_and_what_it_took_before_is_done() -> None:
    paged = Paged("NL_X_NB_BS_HS", torch.int8, SHAPE, device="cuda")
    paged.fill_random(fresh_seed())
    with slots_in("host", 1, paged.layout.part_bytes(3)) as slots:
        with cuda_copier(paged.layout) as copier:
            handle = copier.gather([PartCopy(slots.address(0), [1, 2, 3])])
        assert handle.done() and handle.result()[0].checksum == checksum(paged.reference([1, 2, 3]))
        copier.close()
        with pytest.raises(CopierClosed):
            copier.gather([PartCopy(slots.address(0), [1])])


def test_memory_for_slots_is_registered_once_and_given_up() -> None:
    raw = torch.zeros(4 << 20, dtype=torch.uint8)
    address = raw.data_ptr() + -raw.data_ptr() % 4096
    memory = _core.CudaSlotMemory(device=0, address=address, bytes=1 << 20, host=True)
    with pytest.raises(CudaError, match="not yet in use for slots"):
        _core.CudaSlotMemory(device=0, address=address + 4096, bytes=4096, host=True)
    memory.close()
    _core.CudaSlotMemory(device=0, address=address, bytes=1 << 20, host=True).close()


class RandomCase:
    """Planes of any strides over one raw buffer, block lists, skips and a tuning, all drawn from `random`."""

    def __init__(self, random: np.random.Generator) -> None:
        self.blocks = int(random.integers(1, 70))
        unit = int(random.choice([16, 48, 128, 256]))
        self.planes: list[tuple[int, int, int, int, int]] = []
        offset = 0
        like = bool(random.integers(2))
        for _ in range(int(random.integers(1, 9))):
            if not (like and self.planes):
                runs = int(random.choice([1, 1, 2, 7]))
                run_bytes = unit * int(random.integers(1, 40))
                gap = 0 if runs == 1 else int(random.choice([0, 16, 128]))
                block_gap = int(random.choice([0, 16, 4096]))
            block_stride = (run_bytes + gap) * runs + block_gap
            self.planes.append((offset, block_stride, run_bytes, runs, run_bytes + gap))
            offset += self.blocks * block_stride + int(random.choice([0, 16, 4096]))
        self.bytes = offset
        few = min(self.blocks, 32)
        self.lists = [random.permutation(self.blocks)[: int(random.integers(0, few + 1))].tolist() for _ in range(4)]
        self.skips = [int(random.integers(0, len(ids) + 1)) for ids in self.lists]
        ends = [end for end in range(1, len(self.planes)) if random.integers(2)]
        self.bands = [*ends, len(self.planes)] if ends else []
        self.verified_after = int(random.integers(0, len(self.bands) + 1))
        direct = int(random.choice([0, 1 << 40]))
        load, store, at_once = (int(random.integers(1, 33)) for _ in range(3))
        self.tuning = CopyTuning(
            1 << 20, int(random.integers(2, 4)), load, store, at_once, direct, direct, int(random.integers(1, 4)),
            int(random.choice([0, 4096, 64 << 20])),
        )

    def layout(self, base: int) -> PagedLayout:
        planes = tuple((base + plane[0], *plane[1:]) for plane in self.planes)
        core = _core.PagedLayout(planes, num_blocks=self.blocks, block_tokens=1)
        return PagedLayout("random", "ND", planes, self.blocks, 1, (), core)


@pytest.mark.parametrize("round_", range(8))
def test_random_layouts_move_as_the_cpu_moves_them(round_: int) -> None:
    seed = fresh_seed()
    random = np.random.default_rng(seed)
    for number in range(12):
        case = RandomCase(random)
        host = torch.from_numpy(random.integers(0, 256, case.bytes + 4096, dtype=np.uint8))
        at = -host.data_ptr() % 4096
        paged = host[at : at + case.bytes].cuda()
        on_cpu, on_gpu = case.layout(host.data_ptr() + at), case.layout(paged.data_ptr())
        most = on_gpu.part_bytes(32)
        label = f"seed {seed}, case {number}"
        with slots_in("host", 4, most) as slots, cuda_copier(on_gpu, case.tuning) as copier:
            got = copier.gather([PartCopy(slots.address(i), ids) for i, ids in enumerate(case.lists)]).result()
            cpu = CpuCopier(on_cpu, threads=1)
            plain = _cpu_gather(cpu, case.lists, most)
            for i, (sum_, data) in enumerate(plain):
                assert got[i].checksum == sum_ and slots.read(i)[: len(data)] == data, label
                slots.write(i, random.bytes(len(data)).ljust(most, b"\0"))
            # Blocks that two parts write would be either's: each part alone.
            for i, ids in enumerate(case.lists):
                expected = checksum(slots.read(i)[: len(plain[i][1])])
                part = PartCopy(slots.address(i), ids, case.skips[i], expected)
                handle = copier.scatter([part], bands=case.bands, verified_after=case.verified_after)
                assert handle.verified(None) == handle.result() == [PartResult(expected, True)], label
                assert cpu.scatter([part]).result()[0].ok, label
                assert torch.equal(paged.cpu(), host[at : at + case.bytes]), label
            cpu.close()


def _cpu_gather(copier: CpuCopier, lists: list[list[int]], most: int) -> list[tuple[int, bytes]]:
    slots = Slots(len(lists), most)
    found = copier.gather([PartCopy(slots.address(i), ids) for i, ids in enumerate(lists)]).result()
    sizes = [most // 32 * len(ids) for ids in lists]
    return [(found[i].checksum, slots.read(i)[:size]) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("way", WAYS)
def test_layouts_beside_each_other_share_staging_and_keep_their_bytes(way: str) -> None:
    kinds = [
        ("NL_X_NB_TWO_BS_NH_HS", torch.bfloat16), ("NL_X_NB_BS_HS", torch.float32), ("NB_NL_TWO_NH_BS_HS", torch.int8)
    ]
    everyone = [Paged(name, dtype, SHAPE, device="cuda") for name, dtype in kinds]
    ids = [5, 0, 3, 8, 6]
    for paged in everyone:
        paged.fill_random(fresh_seed())
    most = max(paged.layout.part_bytes(5) for paged in everyone)
    with slots_in("host", 6, most) as slots, cuda_copier(everyone[0].layout, WAYS[way]) as first:
        copiers = [first, *(first.beside(paged.layout) for paged in everyone[1:])]
        assert {copier.staging_bytes for copier in copiers} == {first.staging_bytes}
        wanted = [paged.reference(ids) for paged in everyone]
        handles = [copier.gather([PartCopy(slots.address(i), ids)]) for i, copier in enumerate(copiers)]
        for i, handle in enumerate(handles):
            assert handle.result()[0].checksum == checksum(wanted[i]) and slots.read(i)[: len(wanted[i])] == wanted[i]
        for paged in everyone:
            paged.fill_guard()
        torch.cuda.synchronize()
        handles = [copier.scatter([PartCopy(slots.address(i), ids[::-1], 1, checksum(wanted[i]))])
                   for i, copier in enumerate(copiers)]
        assert all(handle.result()[0].ok for handle in handles)
        for paged, part in zip(everyone, wanted, strict=True):
            size = len(paged.block_bytes(0, 0, 0))
            guarded = [part[at : at + size] for at in range(0, len(part), size)]
            guarded[::5] = [bytes([GUARD]) * size] * len(guarded[::5])
            assert paged.reference(ids[::-1]) == b"".join(guarded)
        copiers[1].close()
        with pytest.raises(CopierClosed):
            first.gather([PartCopy(slots.address(0), ids)])


def test_staging_stays_within_its_budget() -> None:
    layout = Paged("NL_X_NB_BS_HS", torch.int8, SHAPE, device="cuda").layout
    with cuda_copier(layout, CopyTuning()) as load, cuda_copier(layout, DIRECT) as store:
        assert load.staging_bytes == CopyTuning().piece_bytes * CopyTuning().buffers
        assert load.staging_bytes * 2 <= 2 * 32 << 20, "loads and stores have a copier each"
        assert store.staging_bytes == 2 << 20

"""On a GPU: the linker's copies beside a forward pass on a stream of its own, which nobody waits for.

The checks want a pool in which a copy takes milliseconds, so that one that is out of order meets the wrong bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from linker_checks import PAGE, ended, keys_of, transfer

COUNT, ROUNDS = 96, 8
"""Pages of a load."""
SLOW_CYCLES = 100_000_000
"""Some 50 ms of a kernel that does nothing."""


def rows_of(pages: Sequence[int]) -> torch.Tensor:
    return torch.tensor([page * PAGE + token for page in pages for token in range(PAGE)], device="cuda")


def buffers(pool: Any) -> list[tuple[int, torch.Tensor]]:
    """(layer, its keys or its values)."""
    return [(layer, one) for both in (pool.k_buffer, pool.v_buffer) for layer, one in enumerate(both)]


def halves(of_buffers: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """(0 for keys and 1 for values, what is in that buffer)."""
    return [(2 * at // len(of_buffers), one) for at, one in enumerate(of_buffers)]


def write(pool: Any, rows: torch.Tensor, source: torch.Generator) -> list[torch.Tensor]:
    """Random KV, on the current stream; what was written, by buffer."""
    written = []
    for _, one in buffers(pool):
        new = torch.randn((len(rows), *one.shape[1:]), generator=source, device="cuda", dtype=one.dtype)
        one[rows] = new
        written.append(new)
    return written


def scattered(pool: Any, draw: random.Random) -> tuple[list[int], list[int]]:
    """Pages to store from, and others to load into; neither is in order."""
    pages = draw.sample(range(1, pool.size // PAGE), 2 * COUNT)
    return pages[:COUNT], pages[COUNT:]


def stored(linker: Any, pool: Any, stream: Any, pages: list[int], keys: list[str], seed: int) -> list[torch.Tensor]:
    """What was written to `pages` behind slow work, and offered while the GPU had not written it yet."""
    rows = rows_of(pages)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW_CYCLES)
        written = write(pool, rows, torch.Generator("cuda").manual_seed(seed))
    assert linker.offload([transfer(keys, pages, "cuda")])
    assert ended(linker, 1) == [True]
    return written


def a_store_comes_after_the_forward_pass_that_computes_it(linker: Any, pool: Any, stream: Any) -> None:
    from_pages, to_pages = scattered(pool, random.Random(1))
    keys = keys_of("computed", COUNT)
    written = stored(linker, pool, stream, from_pages, keys, 1)
    rows = rows_of(to_pages)
    assert linker.lookup("computed", [transfer(keys)])[-1] == COUNT
    assert linker.load("computed", [transfer(keys, to_pages, "cuda")])
    index = linker.start_layer_wise_loading()
    assert linker.finish_layer_wise_loading(index)
    torch.cuda.synchronize()
    for (layer, one), new in zip(buffers(pool), written, strict=True):
        assert torch.equal(one[rows], new), f"layer {layer}"


def a_layer_is_read_after_its_copy_and_no_other_page_is_written(linker: Any, pool: Any, stream: Any) -> None:
    """The forward pass asks for each layer and reads it at once, on its stream; the host waits for nothing."""
    for seed in range(2, 2 + ROUNDS):
        draw = random.Random(seed)
        from_pages, to_pages = scattered(pool, draw)
        keys = keys_of(f"layers {seed}", COUNT)
        written = stored(linker, pool, stream, from_pages, keys, seed)
        rows, others = rows_of(to_pages), torch.ones(pool.k_buffer[0].shape[0], dtype=torch.bool, device="cuda")
        others[rows] = False
        for _, one in buffers(pool):
            one[rows] = float("nan")
        before = [one[others].clone() for _, one in buffers(pool)]
        assert linker.lookup(f"layers {seed}", [transfer(keys)])[-1] == COUNT
        assert linker.load(f"layers {seed}", [transfer(keys, to_pages, "cuda")])
        torch.cuda.synchronize()
        index = linker.start_layer_wise_loading()
        linker.layer_done_counter.set_consumer(index)
        seen: dict[tuple[int, int], torch.Tensor] = {}
        with torch.cuda.stream(stream):
            for layer in range(pool.layer_num):
                linker.layer_done_counter.wait_until(layer)
                for part, both in enumerate((pool.k_buffer, pool.v_buffer)):
                    seen[part, layer] = both[layer][rows]
        assert linker.finish_layer_wise_loading(index)
        linker.layer_done_counter.set_consumer(-1)
        torch.cuda.synchronize()
        for (layer, _), (part, new) in zip(buffers(pool), halves(written), strict=True):
            assert torch.equal(seen[part, layer], new), f"round {seed}, layer {layer} was read before its copy"
        for (layer, one), was in zip(buffers(pool), before, strict=True):
            assert torch.equal(one[others], was), f"round {seed}, layer {layer}: another page was written"


def a_load_is_written_after_what_still_reads_its_pages(linker: Any, pool: Any, stream: Any) -> None:
    """A forward pass that has begun reads pages that were given away since: the load into them comes after it."""
    from_pages, to_pages = scattered(pool, random.Random(99))
    keys = keys_of("given away", COUNT)
    written = stored(linker, pool, stream, from_pages, keys, 99)
    rows = rows_of(to_pages)
    was = [one[rows].clone() for _, one in buffers(pool)]
    assert linker.lookup("given away", [transfer(keys)])[-1] == COUNT
    assert linker.load("given away", [transfer(keys, to_pages, "cuda")])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW_CYCLES)
        read = [one[rows] for _, one in buffers(pool)]
    index = linker.start_layer_wise_loading()
    assert linker.finish_layer_wise_loading(index)
    torch.cuda.synchronize()
    for old, seen, new, (layer, one) in zip(was, read, written, buffers(pool), strict=True):
        assert torch.equal(seen, old), f"layer {layer} was written while it was still read"
        assert torch.equal(one[rows], new), f"layer {layer}"


STREAM_CHECKS: tuple[Callable[[Any, Any, Any], None], ...] = (
    a_store_comes_after_the_forward_pass_that_computes_it,
    a_layer_is_read_after_its_copy_and_no_other_page_is_written,
    a_load_is_written_after_what_still_reads_its_pages,
)

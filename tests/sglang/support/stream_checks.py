"""On a GPU: the linker's copies beside a forward pass on a stream of its own, which nobody waits for.

The checks want a pool in which a copy takes milliseconds, so that one that is out of order meets the wrong bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from linker_checks import PAGE, ended, found, keys_of, transfer

COUNT, ROUNDS = 96, 8
"""Pages of a load."""
SLOW_CYCLES = 100_000_000
"""Some 50 ms of a kernel that does nothing."""


def rows_of(pages: Sequence[int]) -> torch.Tensor:
    return torch.tensor([page * PAGE + token for page in pages for token in range(PAGE)], device="cuda")


Named = dict[tuple[str, int, int], torch.Tensor]


def buffers(pool: Any, draft: Any) -> Named:
    """By whose they are, 0 for keys and 1 for values, and layer."""
    return {
        (whose, part, layer): one for whose, of in (("target", pool), ("draft", draft))
        for part, both in enumerate((of.k_buffer, of.v_buffer)) for layer, one in enumerate(both)
    }


def write(named: Named, rows: torch.Tensor, seed: int) -> Named:
    """Random KV, on the current stream; what was written."""
    source, written = torch.Generator("cuda").manual_seed(seed), Named()
    for name, one in named.items():
        written[name] = torch.randn((len(rows), *one.shape[1:]), generator=source, device="cuda", dtype=one.dtype)
        one[rows] = written[name]
    return written


def scattered(pool: Any, draw: random.Random) -> tuple[list[int], list[int]]:
    """Pages to store from, and others to load into; neither is in order."""
    pages = draw.sample(range(1, pool.size // PAGE), 2 * COUNT)
    return pages[:COUNT], pages[COUNT:]


def stored(linker: Any, named: Named, stream: Any, pages: list[int], keys: list[str], seed: int) -> Named:
    """What was written to `pages` behind slow work, and offered while the GPU had not written it yet."""
    rows = rows_of(pages)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW_CYCLES)
        written = write(named, rows, seed)
    assert linker.offload([transfer(keys, pages, "cuda")])
    assert ended(linker, 1) == [True]
    return written


def a_store_comes_after_the_forward_pass_that_computes_it(linker: Any, pool: Any, draft: Any, stream: Any) -> None:
    from_pages, to_pages = scattered(pool, random.Random(1))
    keys, named = keys_of("computed", COUNT), buffers(pool, draft)
    written = stored(linker, named, stream, from_pages, keys, 1)
    rows = rows_of(to_pages)
    assert found(linker, "computed", transfer(keys))[-1] == COUNT
    assert linker.load("computed", [transfer(keys, to_pages, "cuda")])
    index = linker.start_layer_wise_loading()
    assert linker.finish_layer_wise_loading(index)
    torch.cuda.synchronize()
    for name, one in named.items():
        assert torch.equal(one[rows], written[name]), name


def a_layer_is_read_after_its_copy_and_no_other_page_is_written(
    linker: Any, pool: Any, draft: Any, stream: Any
) -> None:
    """The forward pass asks for each layer and reads it at once, on its stream; the host waits for nothing. The draft's
    forward pass follows, and asks for nothing."""
    named = buffers(pool, draft)
    for seed in range(2, 2 + ROUNDS):
        draw = random.Random(seed)
        from_pages, to_pages = scattered(pool, draw)
        keys = keys_of(f"layers {seed}", COUNT)
        written = stored(linker, named, stream, from_pages, keys, seed)
        rows, others = rows_of(to_pages), torch.ones(pool.k_buffer[0].shape[0], dtype=torch.bool, device="cuda")
        others[rows] = False
        for one in named.values():
            one[rows] = float("nan")
        before = {name: one[others].clone() for name, one in named.items()}
        assert found(linker, f"layers {seed}", transfer(keys))[-1] == COUNT
        assert linker.load(f"layers {seed}", [transfer(keys, to_pages, "cuda")])
        torch.cuda.synchronize()
        index = linker.start_layer_wise_loading()
        linker.layer_done_counter.set_consumer(index)
        seen = Named()
        with torch.cuda.stream(stream):
            for layer in range(pool.layer_num):
                linker.layer_done_counter.wait_until(layer)
                seen |= {name: one[rows] for name, one in named.items() if name[0] == "target" and name[2] == layer}
            seen |= {name: one[rows] for name, one in named.items() if name[0] == "draft"}
        assert linker.finish_layer_wise_loading(index)
        linker.layer_done_counter.set_consumer(-1)
        torch.cuda.synchronize()
        for name, one in named.items():
            assert torch.equal(seen[name], written[name]), f"round {seed}, {name} was read before its copy"
            assert torch.equal(one[others], before[name]), f"round {seed}, {name}: another page was written"


def a_load_is_written_after_what_still_reads_its_pages(linker: Any, pool: Any, draft: Any, stream: Any) -> None:
    """A forward pass that has begun reads pages that were given away since: the load into them comes after it."""
    from_pages, to_pages = scattered(pool, random.Random(99))
    keys, named = keys_of("given away", COUNT), buffers(pool, draft)
    written = stored(linker, named, stream, from_pages, keys, 99)
    rows = rows_of(to_pages)
    was = {name: one[rows].clone() for name, one in named.items()}
    assert found(linker, "given away", transfer(keys))[-1] == COUNT
    assert linker.load("given away", [transfer(keys, to_pages, "cuda")])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW_CYCLES)
        read = {name: one[rows] for name, one in named.items()}
    index = linker.start_layer_wise_loading()
    assert linker.finish_layer_wise_loading(index)
    torch.cuda.synchronize()
    for name, one in named.items():
        assert torch.equal(read[name], was[name]), f"{name} was written while it was still read"
        assert torch.equal(one[rows], written[name]), name


STREAM_CHECKS: tuple[Callable[[Any, Any, Any, Any], None], ...] = (
    a_store_comes_after_the_forward_pass_that_computes_it,
    a_layer_is_read_after_its_copy_and_no_other_page_is_written,
    a_load_is_written_after_what_still_reads_its_pages,
)
"""Each gets the linker, the target's pool, the draft's and the stream of the forward pass."""

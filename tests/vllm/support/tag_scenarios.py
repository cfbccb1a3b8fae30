"""Requests whose KV depends on more than tokens: each scenario counts what its requests load of what others stored.

Every request has the same tokens, and each comes to an engine whose own prefix cache is empty.
"""

from __future__ import annotations

import importlib
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sched_engine import SchedEngine
from sched_scenarios import hash_seed, prompt
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import RequestStatus
from warnings_heard import warnings_heard

from kvdock.client.client import Client
from kvdock.connectors.vllm import request_tag
from kvdock.connectors.vllm.adapters import AdapterLoads
from kvdock.connectors.vllm.connector import KvdockConnector
from kvdock.protocol.hits import PromptRun
from kvdock.protocol.keys import HASH_FUNCTION
from kvdock.protocol.schemas import listed_id

CHUNK, TOKENS = 32, 150
ALL = 128
"""What a request of TOKENS tokens can load."""
IMAGE_AT, IMAGE_TOKENS = 40, 20
"""In the second chunk."""
TICK_S = 0.05
"""Longer than a file system takes for two moments to be told apart."""

Request = dict[str, Any]


def engine_at(address: str, keys: str, name: str, **settings: Any) -> SchedEngine:
    """`keys`: "tokens" or "hashes", what plain requests have theirs from; `name`: engines of one name can share."""
    request_tag.WAIT_S = 10.0  # a busy machine hashes late
    as_vllm = KvdockConnector._hashing
    if keys == "tokens":
        KvdockConnector._hashing = lambda connector: (HASH_FUNCTION, "")
    try:
        with hash_seed("7"):
            engine = SchedEngine(address, weights_digest=name, blocks=100, **settings)
    finally:
        KvdockConnector._hashing = as_vllm
    scheduler = engine.scheduler
    scheduler.max_num_encoder_input_tokens, scheduler.encoder_cache_manager = 1024, EncoderCacheManager(1024)
    figures, engine.bypassed = scheduler.connector._scheduler.figures, Counter[str]()
    count = figures.add

    def counted(name: str, amount: float) -> None:
        kind, _, why = name.partition("_")
        engine.bypassed[why] += amount if kind == "bypassed" else 0
        count(name, amount)

    figures.add = counted
    return engine


def run(engine: SchedEngine, made: Request) -> int:
    """Tokens that the request loads."""
    if engine.requests:
        engine.forget_prefixes()
    before = engine.loaded_tokens
    engine.complete(f"r{len(engine.requests)}", prompt(1, TOKENS), 2, **made)
    return int(engine.loaded_tokens - before)


def ended(engine: SchedEngine, loaded: list[int]) -> dict[str, Any]:
    wrong = len(engine.bad_reads) + engine.wrong_tokens
    engine.close()
    return {"loaded": loaded, "bypassed": +engine.bypassed, "wrong": wrong}


def apart(address: str, keys: str, made: Callable[[str], list[Request]]) -> dict[str, Any]:
    """Each request to an engine of its own, one after the other, as in different instances."""
    name, loaded, bypassed, wrong = os.urandom(8).hex(), list[int](), dict[str, Any](), 0
    for number in range(len(made("hex"))):
        engine = engine_at(address, keys, name)
        loaded.append(run(engine, made(name)[number]))
        figures = ended(engine, [])
        bypassed |= figures["bypassed"]
        wrong += figures["wrong"]
    return {"loaded": loaded, "bypassed": bypassed, "wrong": wrong}


def salts(address: str, keys: str) -> dict[str, Any]:
    return apart(address, keys, lambda name: [
        {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}, {}, {}, {"cache_salt": "b"},
    ])


# ---------------------------------------------------------------------- adapters


def adapter(folder: str, content: str, **more: Any) -> Request:
    """A request for the adapter "sql" in the folder, which is made if it is not there."""
    path = Path(folder)
    if not path.exists():
        path.mkdir(parents=True)
        (path / "adapter_config.json").write_text('{"r": 8}')
        (path / "adapter_model.safetensors").write_text(content * 1000)
        time.sleep(TICK_S)
    return {"lora_request": LoRARequest(**{"lora_name": "sql", "lora_int_id": 1, "lora_path": folder, **more})}


def adapters(address: str, keys: str, folder: str) -> dict[str, Any]:
    """Two instances with one adapter, one with another of its name, and one whose copy lies elsewhere and is called
    something else."""
    for name, content in (("one", "a"), ("other", "b"), ("copy", "a")):
        adapter(f"{folder}/{name}", content)
    return apart(address, keys, lambda name: [
        adapter(f"{folder}/one", "a"), adapter(f"{folder}/one", "a"), adapter(f"{folder}/other", "b"), {},
        adapter(f"{folder}/copy", "a", lora_name="query", lora_int_id=5),
    ])


def replaced(address: str, keys: str, folder: str, how: str) -> dict[str, Any]:
    """One instance stores and loads with an adapter, which is then another one in some way, and what it computes from
    then on nobody gets: neither itself nor an instance that starts with what is there now."""
    name, path = os.urandom(8).hex(), f"{folder}/adapter"
    adapter(f"{folder}/second", "b")  # before the engine starts, or it would be too new
    if how == "link":
        adapter(f"{folder}/first", "a")
        Path(path).symlink_to(f"{folder}/first")
        time.sleep(TICK_S)
    first = adapter(path, "a")
    engine = engine_at(address, keys, name)
    loaded = [run(engine, first), run(engine, first)]
    then = first
    if how == "written":
        (Path(path) / "adapter_model.safetensors").write_text("b" * 1000)
    elif how == "link":
        Path(path).unlink()
        Path(path).symlink_to(f"{folder}/second")
    elif how == "name":
        then = adapter(f"{folder}/second", "b", lora_int_id=2)
    elif how == "number":
        then = adapter(f"{folder}/second", "b", lora_name="query")
    loaded += [run(engine, then), run(engine, then)]
    figures = ended(engine, loaded)
    time.sleep(TICK_S)
    later = engine_at(address, keys, name)
    loaded.append(run(later, then))
    later.close()
    return figures


def too_new(address: str, keys: str, folder: str, heard: bool) -> dict[str, Any]:
    """An adapter that was written after the engine started. Not `heard`: the workers may have loaded what was there
    before."""
    usual, request_tag.LOADS = request_tag.LOADS, AdapterLoads()
    try:
        if heard:
            importlib.import_module("vllm.v1.engine.core")  # its methods are wrapped
            request_tag.LOADS.listen()
        name = os.urandom(8).hex()
        engine = engine_at(address, keys, name)
        time.sleep(TICK_S)
        made = adapter(f"{folder}/new", "a")
        with warnings_heard() as said:
            loaded = [run(engine, made), run(engine, made)]
        later = engine_at(address, keys, name)
        loaded.append(run(later, adapter(f"{folder}/new", "", lora_name="query", lora_int_id=3)))
        later.close()
    finally:
        request_tag.LOADS = usual
    return {**ended(engine, loaded), "said": [line for line in said if "is not cached" in line]}


def no_files(address: str, keys: str, folder: str) -> dict[str, Any]:
    """Adapters of which there are no files, or not all of them."""
    Path(folder, "half").mkdir(parents=True)
    Path(folder, "half", "adapter_config.json").write_text("{}")
    time.sleep(TICK_S)
    engine = engine_at(address, keys, os.urandom(8).hex())
    paths = f"{folder}/half", f"{folder}/nothing", "someone/on-a-hub"
    made = [
        adapter(folder, "", lora_path=path, lora_name=path, lora_int_id=n) for n, path in enumerate(paths, 1)
    ]
    return ended(engine, [run(engine, one) for one in (*made, *made)])


# ---------------------------------------------------------------------- images


def image(content: float, name: str = "", at: int = IMAGE_AT, **more: Any) -> MultiModalFeatureSpec:
    """`name`: what the client calls it; vLLM's hash of its content if it does not say. `content` None: not here."""
    tensors = {"pixel_values": torch.full((3, 4), content), "image_grid_thw": torch.tensor([1, 2, 2])}
    data = {key: MultiModalFieldElem(data=one, field=MultiModalBatchedField()) for key, one in tensors.items()}
    return MultiModalFeatureSpec(**{
        "data": MultiModalKwargsItem(data), "modality": "image", "identifier": name or f"{content}" * 16,
        "mm_position": PlaceholderRange(offset=at, length=IMAGE_TOKENS), **more,
    })


def with_images(*images: MultiModalFeatureSpec) -> Request:
    return {"mm_features": list(images)}


def images(address: str, keys: str) -> dict[str, Any]:
    """The same image twice; another one; the first at another place; twice in one prompt; under a client's name, which
    is then another image's."""
    return apart(address, keys, lambda name: [
        with_images(image(0.5)), with_images(image(0.5)), with_images(image(0.25)), with_images(image(0.5, at=41)),
        with_images(image(0.5), image(0.5, at=100)), with_images(image(0.75, "logo")),
        with_images(image(0.125, "logo")), with_images(image(0.75, "other name")),
    ])


def one_name(address: str, keys: str) -> dict[str, Any]:
    """In one instance: what has the name of another image is not cached, and neither is that one from then on."""
    engine = engine_at(address, keys, os.urandom(8).hex())
    made = [image(0.5, "logo"), image(0.5, "logo"), image(0.25, "logo"), image(0.25, "logo"), image(0.5, "logo")]
    return ended(engine, [run(engine, with_images(one)) for one in made])


def not_here(address: str, keys: str) -> dict[str, Any]:
    """Images that vLLM has put elsewhere: in a worker's cache, or in shared memory under an address."""
    engine = engine_at(address, keys, os.urandom(8).hex())
    address_of = {"address": MultiModalFieldElem(data=4096, field=MultiModalBatchedField())}
    made = [
        image(0.5, "nothing", data=None), image(0.5, "address", data=MultiModalKwargsItem(address_of)),
        image(0.5, "nothing"),  # its name was not trusted before
    ]
    return ended(engine, [run(engine, with_images(one)) for one in (*made, *made)])


def growing(address: str, keys: str) -> dict[str, Any]:
    """What a prompt grew by may be images, and these never came here."""
    engine = engine_at(address, keys, os.urandom(8).hex())
    loaded = [run(engine, with_images(image(0.5))), run(engine, with_images(image(0.5)))]
    half = engine.scheduler.connector._scheduler
    request = engine.add("growing", prompt(2, 70), 1, cache_salt="b")
    request.resumable = True
    half._tags.finished("growing")  # it had arrived before we said so
    half._tags.arrived(request)
    request.resumable = False  # else it would never end here
    engine.run()
    return ended(engine, [*loaded, run(engine, with_images(image(0.5)))])


def unready(address: str, keys: str) -> dict[str, Any]:
    """A lookup does not wait long for an image to be hashed; what is known by the end is stored all the same."""
    engine = engine_at(address, keys, os.urandom(8).hex())
    request_tag.WAIT_S = 0.0
    hashing = engine.scheduler.connector._scheduler._tags._hashing
    hashing.run(time.sleep, 0.2)
    shown = image(0.5)
    loaded = [run(engine, with_images(shown))]
    before = +engine.bypassed
    hashing.run(lambda: None).result()
    loaded += [run(engine, with_images(shown)) for _ in range(2)]
    return {**ended(engine, loaded), "before": before}


# ---------------------------------------------------------------------- what requests ask for


def asks(**own: Any) -> Request:
    return {"kv_transfer_params": {"kvdock": own}}


def controls(address: str) -> dict[str, Any]:
    """What requests load that may not, or whose tokens may not be stored, and what each hears with its answer.
    `sources`: what vLLM heard when it asked where the tokens of a load came from."""
    engine = engine_at(address, "hashes", os.urandom(8).hex(), compute_once=2.0)
    connector, answers, sources = engine.scheduler.connector, list[Any](), list[dict[str, int]]()
    ended_as = connector.request_finished_all_groups
    came_from = connector.get_external_cache_hit_sources

    def noted(request: Any, block_ids: Any) -> Any:
        found = ended_as(request, block_ids)
        answers.append(found[1])
        return found

    def asked(request: Any, tokens: int) -> Any:
        found = came_from(request, tokens)
        sources.append({source.value: count for source, count in found.items()})
        return found

    connector.request_finished_all_groups, connector.get_external_cache_hit_sources = noted, asked
    made = [
        asks(store=False, report=True), asks(report=True), asks(load=False, report=True), asks(report=True), {},
        {"kv_transfer_params": {"kvdock": {"report": True}, "do_remote_decode": True}},
        asks(report=True) | adapter_nowhere(),
    ]
    loaded = [run(engine, one) for one in made]
    return {**ended(engine, loaded), "answers": answers, "sources": sources}


def weights(address: str, keys: str, on_reset: str) -> dict[str, Any]:
    """One instance before, between and after two resets, then another one. Some requests name their weights."""
    name, named = os.urandom(8).hex(), asks(weights="1")
    first, answers = engine_at(address, keys, name, on_reset=on_reset), list[bool]()
    loaded = [run(first, {})]
    for following in ([{}, {}, named], [{}, named]):
        answers.append(first.scheduler.reset_prefix_cache(reset_connector=True))
        loaded += [run(first, one) for one in following]
    wrong = ended(first, [])["wrong"]
    other = engine_at(address, keys, name, on_reset=on_reset)
    loaded += [run(other, one) for one in ({}, named, asks(weights="2"))]
    found = ended(other, loaded)
    return found | {"answers": answers, "wrong": found["wrong"] + wrong}


def told(address: str) -> dict[str, Any]:
    """What the server hears of each request: of one that stores, one that loads, one that vLLM's own cache has, one
    that is not looked up, one that is too short, and one that is aborted while it runs."""
    engine = engine_at(address, "hashes", os.urandom(8).hex())
    loaded = [run(engine, {}), run(engine, {})]
    engine.complete("r2", prompt(1, TOKENS), 2)
    loaded.append(run(engine, adapter_nowhere()))
    engine.complete("r4", prompt(2, 20), 2)
    engine.add("r5", prompt(3, TOKENS), 200)
    for _ in range(3):
        engine.step()
    engine.scheduler.finish_requests("r5", RequestStatus.FINISHED_ABORTED)
    engine.run()
    session, rows, end = listed_id(engine.half._session.attachment.session), list[Any](), time.monotonic() + 20
    with Client(address) as client:
        while len({row[0] for row in rows}) < len(engine.requests) and time.monotonic() < end:
            time.sleep(TICK_S)
            views = [view for view in client.requests(limit=1000).requests if view.session == session]
            told_of = [(view, view.outcome) for view in views if view.outcome is not None]
            rows = [
                (view.request, view.kind, one.prompt_tokens, one.found_tokens, one.why, *map(words_of, one.runs))
                for view, one in told_of
            ]
    loads = {
        view.request: [one.loaded_bytes, one.load_us is not None and (one.copy_us or 0) <= one.load_us]
        for view, one in told_of if one.loaded_tokens
    }
    return {**ended(engine, loaded), "rows": sorted(rows), "loads": loads}


def words_of(run: PromptRun) -> str:
    return f"{run.tokens} {run.origin} {run.source or run.why}".rstrip()


def adapter_nowhere() -> Request:
    return {"lora_request": LoRARequest(lora_name="nowhere", lora_int_id=9, lora_path="/nowhere")}

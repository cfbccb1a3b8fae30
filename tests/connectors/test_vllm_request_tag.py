"""What requests depend on beside their tokens. tests/vllm/test_tags.py has vLLM's own requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvdock.connectors.tensors import Unhashable
from kvdock.connectors.vllm.adapters import digest_of_files, look_at
from kvdock.connectors.vllm.request_tag import (
    PLAIN,
    WAIT_S,
    Tag,
    Tags,
    chain_of,
    digest_of_item,
    digest_of_tensor,
    is_plain,
)
from kvdock.protocol.keys import HashedChain, KeyChain, Mark

NAMESPACE, HASHES = bytes(32), [bytes([n]) * 32 for n in range(4)]
IMAGE = {"pixel_values": torch.ones(3, 4), "image_grid_thw": torch.tensor([1, 2, 2])}


def item(**tensors: Any) -> Any:
    return Item({name: SimpleNamespace(data=data) for name, data in {**IMAGE, **tensors}.items()})


class Item(dict[str, Any]):
    """As vLLM's, somebody may refer to it weakly."""


def feature(name: str = "hash", data: Any = None, *, at: int = 4, count: int = 3, **more: Any) -> Any:
    place = SimpleNamespace(offset=at, length=count, is_embed=more.pop("is_embed", None))
    shown = item() if data is None else data
    return SimpleNamespace(**{"identifier": name, "data": shown, "modality": "image", "mm_position": place, **more})


def request(name: str = "r", **more: Any) -> Any:
    return SimpleNamespace(**{"request_id": name, "prompt_token_ids": [1] * 12, **more})


def adapter_at(folder: Path, content: str = "a") -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(content)
    return str(folder)


def lora(path: str, name: str = "sql", number: int = 1, **more: Any) -> dict[str, Any]:
    return {"lora_request": SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path, **more)}


@pytest.fixture
def tags() -> Iterator[Tags]:
    made = Tags(began_ns=time.time_ns() + 10**12)
    yield made
    made.close()


def tag_of(tags: Tags, asked: Any) -> Tag | None:
    """When all that it has is hashed."""
    tags.arrived(asked)
    tags._hashing.run(lambda: None).result()
    return tags.of(asked)


def keys_of(tag: Tag | None) -> list[bytes]:
    chain = chain_of(tag, NAMESPACE, 4, HASHES, 4)
    chain.follow([1] * 12)
    return chain.keys


@pytest.mark.parametrize("extra", [
    {"lora_request": object()}, {"mm_features": [1]}, {"cache_salt": "a"}, {"prompt_embeds": object()},
    {"prompt_token_ids": None}, {"resumable": True},
])
def test_requests_that_depend_on_more_than_tokens_are_told_apart(extra: dict[str, Any]) -> None:
    assert is_plain(request()) and not is_plain(request(**extra))


def test_a_plain_request_has_the_keys_that_it_always_had(tags: Tags) -> None:
    for hash_tokens, chain in ((None, KeyChain(NAMESPACE, 4)), (4, HashedChain(NAMESPACE, 4, HASHES, 4))):
        made = chain_of(tags.of(request()), NAMESPACE, 4, HASHES, hash_tokens)
        for one in (made, chain):
            one.follow([1] * 12)
        assert made.keys == chain.keys and tags.of(request()) is PLAIN
    assert keys_of(None) == []


@pytest.mark.parametrize(("one", "other", "shared"), [
    ({"cache_salt": "a"}, {"cache_salt": "a"}, 3), ({"cache_salt": "a"}, {"cache_salt": "b"}, 0),
    ({"prompt_embeds": torch.ones(12, 2)}, {"prompt_embeds": torch.ones(12, 2)}, 3),
    ({"prompt_embeds": torch.ones(12, 2)}, {"prompt_embeds": torch.zeros(12, 2)}, 0),
    ({"prompt_embeds": torch.zeros(12, 2)}, {"prompt_embeds": torch.zeros(12, 2, dtype=torch.int32)}, 0),
    ({"mm_features": [feature()]}, {"mm_features": [feature("another name")]}, 3),
    ({"mm_features": [feature()]}, {"mm_features": [feature("zeros", item(pixel_values=torch.zeros(3, 4)))]}, 1),
    ({"mm_features": [feature()]}, {"mm_features": [feature("grid", item(image_grid_thw=torch.tensor([1, 4, 1])))]}, 1),
    ({"mm_features": [feature()]}, {"mm_features": [feature(at=5)]}, 1),
    ({"mm_features": [feature()]}, {"mm_features": [feature(count=4)]}, 1),
    ({"mm_features": [feature()]}, {"mm_features": [feature(), feature(at=9)]}, 2),
    ({"mm_features": [feature()]}, {"mm_features": [feature(modality="video")]}, 1),
    ({"mm_features": [feature()]}, {"mm_features": [feature(is_embed=torch.tensor([True, False, True]))]}, 1),
    ({"mm_features": [feature()]}, {"mm_features": [feature()], "cache_salt": "a"}, 0),
])
def test_keys_are_shared_as_far_as_requests_are_alike(
    tags: Tags, one: dict[str, Any], other: dict[str, Any], shared: int
) -> None:
    for made in (one, other):
        if "prompt_embeds" in made:
            made["prompt_token_ids"] = None
    keys, others = keys_of(tag_of(tags, request("a", **one))), keys_of(tag_of(tags, request("b", **other)))
    assert len(keys) == len(others) == 3
    assert keys[:shared] == others[:shared] and not set(keys[shared:]) & set(others[shared:])


def test_adapters_are_told_apart_by_their_files(tags: Tags, tmp_path: Path) -> None:
    paths = [adapter_at(tmp_path / name, content) for name, content in (("a", "1"), ("b", "1"), ("c", "2"))]
    made = [
        keys_of(tag_of(tags, request(path, **lora(path, path, number)))) for number, path in enumerate(paths, 1)
    ]
    assert made[0] == made[1] and not set(made[0]) & set(made[2]) and len(made[2]) == 3
    fused = keys_of(tag_of(tags, request("3d", **lora(paths[0], paths[0], is_3d_lora_weight=True))))
    assert not set(fused) & set(made[0])
    other = Tags("another type", began_ns=time.time_ns() + 10**12)
    assert not set(keys_of(tag_of(other, request(**lora(paths[0]))))) & set(made[0])
    other.close()


def test_a_request_is_not_cached_before_its_image_is_hashed_and_waits_for_it_a_moment() -> None:
    now_s, may_hash = [0.0], threading.Event()
    tags = Tags(clock=lambda: now_s[0])

    def hold_up() -> None:
        may_hash.wait(20)

    tags._hashing.run(hold_up)
    asked = request(mm_features=[feature()])
    tags.arrived(asked)
    assert tags.of(asked) is None and tags.waits(asked)
    now_s[0] = WAIT_S
    assert not tags.waits(asked) and [tags.bypassed(asked) for _ in range(2)] == ["unready", ""]
    may_hash.set()
    assert tag_of(tags, asked)
    tags.close()


@pytest.mark.parametrize(("extra", "why"), [
    ({"resumable": True}, "growing"), ({"prompt_token_ids": None}, "embeddings"),
    ({"prompt_embeds": torch.ones(12, 2)}, "embeddings"),
    ({"prompt_embeds": torch.ones(12, 2), "prompt_token_ids": None, "prompt_is_token_ids": [True] * 12}, "embeddings"),
    ({"prompt_embeds": object(), "prompt_token_ids": None}, "embeddings"),
    ({"mm_features": [feature(data=item(address=7))]}, "media"), (lora("/nowhere"), "adapter"),
    (lora("someone/on-a-hub"), "adapter"),
])
def test_what_cannot_be_hashed_is_not_cached(tags: Tags, extra: dict[str, Any], why: str) -> None:
    asked = request(**extra)
    assert tag_of(tags, asked) is None and not tags.waits(asked) and tags.bypassed(asked) == why


def test_an_adapter_that_changes_while_a_request_runs_is_seen_with_the_next_step(tags: Tags, tmp_path: Path) -> None:
    path = adapter_at(tmp_path / "a")
    asked = request(**lora(path))
    assert tag_of(tags, asked)
    (tmp_path / "a" / "adapter_config.json").write_text('{"r": 16}')
    tags.step()
    assert tags.of(asked) is None
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    tags.step()
    assert tags.of(asked) is None, "what was computed meanwhile may still be there"


def test_a_link_made_after_the_start_may_have_led_elsewhere_before(tmp_path: Path) -> None:
    path, link = adapter_at(tmp_path / "a"), tmp_path / "link"
    time.sleep(0.05)  # longer than a file system takes for two moments to be told apart
    tags = Tags(began_ns=time.time_ns())
    time.sleep(0.05)  # likewise
    link.symlink_to(path)
    assert tag_of(tags, request("a", **lora(path))) and tag_of(tags, request("b", **lora(str(link), "link", 2))) is None
    tags.close()


def test_weights_in_another_format_beside_the_old_ones_are_a_change(tmp_path: Path) -> None:
    path = adapter_at(tmp_path / "a")
    folder = Path(path)
    before, digest = look_at(folder), digest_of_files(folder)
    (tmp_path / "a" / "adapter_model.bin").write_text("b")
    assert look_at(folder) != before and digest_of_files(folder) != digest
    (tmp_path / "a" / "adapter_config.json").unlink()
    assert look_at(folder) is None


def test_contents_of_tensors_are_told_apart_by_type_shape_and_elements() -> None:
    made = [torch.arange(6), torch.arange(6).reshape(2, 3), torch.arange(6).reshape(2, 3).T, torch.arange(6).int(),
            torch.arange(6).bfloat16(), torch.arange(0), torch.tensor(0)]
    digests = [digest_of_tensor(one) for one in made] + [digest_of_item(item(more=made[:n])) for n in range(3)]
    assert len(set(digests)) == len(digests)
    assert digest_of_tensor(made[2]) == digest_of_tensor(made[2].contiguous())
    for wrong in (Item(), item(more=None), item(more=[1])):
        with pytest.raises(Unhashable, match=r"found .*, wanted "):
            digest_of_item(wrong)


def test_marks_count_in_the_chunks_that_they_touch() -> None:
    def keys(*marks: Mark) -> list[bytes]:
        return KeyChain(NAMESPACE, 4, marks).extend([1] * 16)

    plain, digest = keys(), bytes(range(32))
    for start, end, first in ((0, 1, 0), (3, 4, 0), (4, 5, 1), (7, 9, 1), (15, 16, 3), (16, 20, 4)):
        marked = keys(Mark(start, end, digest))
        assert marked[:first] == plain[:first] and not set(marked[first:]) & set(plain[first:])
    assert keys(Mark(3, 5, digest))[1] != keys(Mark(3, 4, digest))[1]

"""What requests share whose KV depends on more than tokens, through vLLM's real Schedulers. Keys of plain requests are
made of tokens or of vLLM's hashes; which, must not matter."""

from __future__ import annotations

from pathlib import Path

import pytest
from schedulers import Run, every_version, minor, run_where

pytestmark = pytest.mark.vllm
SCENARIOS = "tag_scenarios"

ALL, TO_THE_IMAGE = 128, 32
both_keys = pytest.mark.parametrize("keys", ["tokens", "hashes"])


run = run_where(lambda found: found.pop("wrong") == 0)


@pytest.mark.every_minor
@every_version
@both_keys
def test_one_salt_is_shared_and_no_other(run: Run, keys: str) -> None:
    assert run("salts", keys) == {"loaded": [0, ALL, 0, 0, ALL, ALL], "bypassed": {}}


@pytest.mark.every_minor
@every_version
@both_keys
def test_one_adapter_is_shared_by_its_files_and_never_by_its_name(run: Run, keys: str, tmp_path: Path) -> None:
    assert run("adapters", keys, str(tmp_path)) == {"loaded": [0, ALL, 0, 0, ALL], "bypassed": {}}


@every_version
@pytest.mark.parametrize("how", ["written", "link", "name", "number"])
def test_an_adapter_that_became_another_one_is_not_cached_any_more(run: Run, how: str, tmp_path: Path) -> None:
    found = run("replaced", "hashes", str(tmp_path), how)
    assert found == {"loaded": [0, ALL, 0, 0, 0], "bypassed": {"adapter": 2}}


@every_version
def test_an_adapter_that_vllm_may_have_read_before_is_not_cached_and_said(run: Run, tmp_path: Path) -> None:
    found = run("too_new", "tokens", str(tmp_path), False)
    (said,) = found.pop("said")
    assert "since this engine started and before kvdock heard of it: load it under another name" in said
    assert found == {"loaded": [0, 0, 0], "bypassed": {"adapter": 2}}


@pytest.mark.every_minor
@every_version
def test_an_adapter_that_vllm_cannot_have_read_before_it_was_met_is_shared(run: Run, tmp_path: Path) -> None:
    found = run("too_new", "tokens", str(tmp_path), True)
    assert found == {"loaded": [0, ALL, ALL], "bypassed": {}, "said": []}


@every_version
def test_an_adapter_without_files_is_not_cached(run: Run, tmp_path: Path) -> None:
    assert run("no_files", "tokens", str(tmp_path)) == {"loaded": [0] * 6, "bypassed": {"adapter": 6}}


@pytest.mark.every_minor
@every_version
@both_keys
def test_images_are_shared_by_what_they_show_and_where(run: Run, keys: str) -> None:
    found = run("images", keys)
    assert found["loaded"] == [0, ALL, TO_THE_IMAGE, TO_THE_IMAGE, 96, TO_THE_IMAGE, TO_THE_IMAGE, ALL]
    assert found["bypassed"] == {}


@every_version
@both_keys
def test_a_name_that_stood_for_two_images_is_not_trusted(run: Run, keys: str) -> None:
    assert run("one_name", keys) == {"loaded": [0, ALL, 0, 0, 0], "bypassed": {"media": 3}}


@every_version
def test_images_that_are_not_here_are_not_cached(run: Run) -> None:
    assert run("not_here", "hashes") == {"loaded": [0] * 6, "bypassed": {"media": 6}}


@every_version
def test_images_are_not_trusted_after_a_prompt_that_grew(run: Run) -> None:
    assert run("growing", "hashes") == {"loaded": [0, ALL, 0], "bypassed": {"growing": 1, "media": 1}}


@every_version
def test_a_lookup_does_not_wait_long_for_an_image_to_be_hashed(run: Run) -> None:
    found = run("unready", "hashes")
    assert found["before"] == {"unready": 1} and found["loaded"][-1] == ALL


@pytest.mark.every_minor
@every_version
def test_requests_say_what_is_done_for_them_and_hear_what_came_of_it(run: Run, version: str) -> None:
    found = run("controls")
    nothing, everything = {"found_tokens": 0, "loaded_tokens": 0}, {"found_tokens": ALL, "loaded_tokens": ALL}
    assert found["loaded"] == [0, 0, 0, ALL, ALL, ALL, 0]
    assert found["answers"] == [
        {"kvdock": nothing}, {"kvdock": nothing}, {"kvdock": nothing | {"why": "opted_out"}}, {"kvdock": everything},
        None, None,
        {"kvdock": nothing | {"why": "bypassed_adapter"}},
    ]
    assert found["sources"] == ([{"host": ALL}] * 3 if minor(version) >= 32 else [])


@every_version
@both_keys
def test_weights_that_may_have_changed_are_kept_apart_and_named_weights_are_shared(run: Run, keys: str) -> None:
    found = run("weights", keys, "apart")
    assert found["answers"] == [True, True]
    assert found["loaded"] == [0, 0, ALL, 0, 0, ALL, ALL, ALL, 0], "the pool is left: others load the first"


@every_version
def test_a_reset_that_leaves_the_pool_changes_nothing(run: Run) -> None:
    assert run("weights", "hashes", "leave")["loaded"] == [0, ALL, ALL, 0, ALL, ALL, ALL, ALL, 0]


@every_version
def test_the_server_hears_what_became_of_each_request(run: Run) -> None:
    found = run("told")
    assert found["loaded"] == [0, ALL, 0]
    tail = f"{150 - ALL} computed tail"
    assert found["rows"] == [
        ["r0", "lookup", 150, 0, "", f"{ALL} computed never_stored", tail],
        ["r1", "lookup", 150, ALL, "", f"{ALL} loaded memory", tail],
        ["r2", "lookup", 150, 0, "", "144 local", "6 computed tail"],
        ["r3", "ended", 150, 0, "bypassed_adapter", f"{ALL} computed bypassed_adapter", tail],
        ["r4", "ended", 20, 0, "", "20 computed short"],
        ["r5", "lookup", 150, 0, "", f"{ALL} computed never_stored", tail],
    ]
    ((request, (loaded_bytes, is_timed)),) = found["loads"].items()
    assert request == "r1" and loaded_bytes > 0 and is_timed

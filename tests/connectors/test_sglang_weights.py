"""What SGLang's calls mean for weights, which hooks are proven, and which pages are of the weights of now."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvdock.connectors.running_weights import RunningWeights
from kvdock.connectors.sglang.updates import (
    START,
    UNKNOWN,
    Changes,
    Fresh,
    Guard,
    Probe,
    is_heard,
    looks_like_change,
    only_reads,
)

pytestmark = pytest.mark.weights


class Followed:
    """Changes, and how often one has begun."""

    def __init__(self) -> None:
        self.weights, self.began = RunningWeights(), 0
        self.changes = Changes(self.weights, self._begin)

    def _begin(self) -> None:
        self.began += 1

    def update(self, version: str | None = None, *, loads: bool = True) -> None:
        with self.changes.call():
            assert not self.weights.may_share
            with self.changes.call():  # a model's own updater
                pass
            if loads:
                self.changes.named(version)


def test_an_update_is_a_change_and_its_version_names_the_weights() -> None:
    one = Followed()
    one.update("5")
    assert one.weights.name == "version 5" and one.weights.may_share and one.began == 1
    one.update()
    assert one.weights.name.startswith("private"), "without a version"
    one.update("6", loads=False)
    assert one.weights.name.startswith("private"), "SGLang has not said that anything was loaded"


def test_from_begin_to_end_nothing_is_shared_and_one_change_is_made_of_all_parts() -> None:
    one = Followed()
    one.changes.opens("session")
    epoch = one.weights.epoch
    one.update("5")
    assert not one.weights.may_share and one.weights.epoch == epoch
    one.update(None)
    one.changes.closes("session")
    assert one.weights.name == "version 5" and one.began == 1


@pytest.mark.parametrize("fails_first", [True, False])
def test_an_update_in_parts_of_which_one_fails_has_no_version(fails_first: bool) -> None:
    one = Followed()
    one.changes.opens("session")
    for loads in (not fails_first, fails_first):
        one.update("5", loads=loads)
    one.changes.closes("session")
    assert one.weights.name.startswith("private")


def test_what_is_written_between_begin_and_end_may_be_named_afterwards() -> None:
    one = Followed()
    one.changes.opens("session")
    one.changes.closes("session")
    epoch = one.weights.epoch
    one.changes.named("5")
    assert one.weights.name == "version 5" and one.weights.epoch == epoch
    one.changes.named("5")
    assert one.weights.epoch == epoch
    one.changes.named("6")
    assert one.weights.epoch > epoch and one.began == 2, "another name stands for other weights"


def test_weights_that_were_released_are_unknown_until_they_are_resumed() -> None:
    one = Followed()
    one.changes.opens("memory")
    one.update("5")
    assert not one.weights.may_share
    one.changes.closes("memory")
    assert one.weights.name == "version 5"


def test_an_end_without_a_begin_is_a_change() -> None:
    one = Followed()
    one.changes.closes("session")
    assert one.weights.may_share and one.weights.name.startswith("private") and one.began == 1


@pytest.mark.parametrize(("name", "changes"), [
    ("update_weights_from_disk", True), ("begin_weight_update", True), ("hot_swap_weights", True),
    ("reload_model", True), ("load_state_dict", True), ("sync_params", True), ("_apply_new_parameters", True),
    ("get_weights_by_name", False), ("init_weights_update_group", False), ("load_lora_adapter", False),
    ("save_sharded_model", False), ("weight_update_runners", False), ("handle_generate_request", False),
    ("update_running_batch", False), ("load_batch", False),
])
def test_a_methods_name_says_whether_it_may_change_weights(name: str, changes: bool) -> None:
    assert looks_like_change(name) == changes


@pytest.mark.parametrize(("action", "reads"), [("checksum", True), ("compare", True), ("reset_tensors", False)])
def test_a_check_of_weights_may_overwrite_them(action: str, reads: bool) -> None:
    assert only_reads(SimpleNamespace(action=action)) == reads


# ---------------------------------------------------------------------- proof


def heard(original: Callable[..., Any]) -> Callable[..., Any]:
    """A hook as kvdock/connectors/sglang/hooks.py makes it."""

    def hook(*arguments: Any) -> Any:
        if isinstance(arguments[0], Probe):
            return arguments[0].heard.add("it")
        return original(*arguments)

    return hook


class Reached(Exception):
    """An original ran."""


def _original(self: Any, request: Any) -> None:
    self.weights = request
    raise Reached


def _reads_first(self: Any, request: Any) -> None:
    self.flush()
    raise Reached


def test_a_probe_is_heard_through_other_hooks_and_stops_elsewhere() -> None:
    assert is_heard(heard(_reads_first)) and is_heard(lambda updater, request: heard(_reads_first)(updater, request))
    assert not is_heard(_reads_first) and not is_heard(_original) and not is_heard(None)
    assert not is_heard(lambda updater, request: None), "another plugin's, which calls nothing"


class Dispatcher:
    def __init__(self, mapping: dict[type, Any]) -> None:
        self._mapping = mapping


class ReloadWeightsRequest: ...


class GenerateRequest: ...


def sglang(**more: Any) -> tuple[Any, dict[str, type]]:
    """Objects of classes with the names that SGLang's have, all of whose hooks are in force."""
    from kvdock.connectors.sglang import updates

    names = {
        "Scheduler": ["plans"], "Updater": updates.CHANGES[updates.UPDATER], "Worker": [],
        "ModelUpdater": updates.CHANGES[updates.MODEL_UPDATER],
    }
    classes = {name: type(name, (), {one: heard(_reads_first) for one in ones}) for name, ones in names.items()}
    scheduler = classes["Scheduler"]()
    scheduler.weight_updater, scheduler.tp_worker = classes["Updater"](), classes["Worker"]()
    scheduler.tp_worker.model_runner = SimpleNamespace(weight_updater=classes["ModelUpdater"]())
    scheduler._request_dispatcher = Dispatcher({
        ReloadWeightsRequest: scheduler.weight_updater.begin_weight_update, GenerateRequest: lambda request: None,
    })
    return scheduler, classes


class Watched:
    """A guard, and what it says."""

    def __init__(self, hook: Callable[[str, str], None] = lambda path, name: None) -> None:
        self.said: list[str] = []
        self.guard = Guard(hook, "plans", self.said.append)

    def meets(self, scheduler: Any) -> bool:
        self.guard.meet(scheduler)
        return self.guard.in_force()


def test_hooks_are_proven_before_anything_is_shared_and_again_when_a_method_is_another() -> None:
    one, (scheduler, classes) = Watched(), sglang()
    assert not one.guard.in_force(), "nobody has planned anything"
    assert one.meets(scheduler) and one.said == []
    updater: Any = classes["Updater"]
    through = updater.update_weights_from_disk
    updater.update_weights_from_disk = lambda self, request: through(self, request)
    assert one.guard.in_force(), "it calls through"
    updater.update_weights_from_disk = lambda self, request: None
    assert not one.guard.in_force() and "Updater.update_weights_from_disk was replaced" in one.said[0]
    updater.update_weights_from_disk = through
    assert not one.guard.in_force() and len(one.said) == 1, "nobody knows what was done meanwhile"


def _drop(scheduler: Any, classes: dict[str, Any]) -> None:
    del classes["ModelUpdater"].end_weight_update


def _bring_one(scheduler: Any, classes: dict[str, Any]) -> None:
    classes["Scheduler"].reload_weights = _reads_first


def _bring_a_class_method(scheduler: Any, classes: dict[str, Any]) -> None:
    classes["Worker"].swap_weights = classmethod(_reads_first)


def _bring_one_that_runs_later(scheduler: Any, classes: dict[str, Any]) -> None:
    async def swap_weights(self: Any, folder: str) -> None: ...

    classes["Worker"].swap_weights = wraps(swap_weights)(heard(swap_weights))


def _bring_one_to_the_object(scheduler: Any, classes: dict[str, Any]) -> None:
    scheduler.load_new_weights = lambda folder: None


def _answer_elsewhere(scheduler: Any, classes: dict[str, Any]) -> None:
    scheduler._request_dispatcher._mapping[ReloadWeightsRequest] = lambda request: None


def _have_no_dispatcher(scheduler: Any, classes: dict[str, Any]) -> None:
    del scheduler._request_dispatcher


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(("breaks", "said"), [
    (_drop, "ModelUpdater has no end_weight_update"), (_bring_one, "Scheduler.reload_weights was replaced"),
    (_bring_a_class_method, "Worker.swap_weights is no plain method"),
    (_bring_one_that_runs_later, "Worker.swap_weights is no plain method"),
    (_answer_elsewhere, "what answers ReloadWeightsRequest does not reach"), (_have_no_dispatcher, "not as expected"),
])
def test_what_is_missing_unknown_or_bypassed_ends_sharing_with_a_sentence(
    breaks: Callable[[Any, dict[str, Any]], None], said: str, is_late: bool
) -> None:
    one, (scheduler, classes) = Watched(), sglang()
    assert not is_late or one.meets(scheduler)
    breaks(scheduler, classes)
    assert not one.meets(scheduler) and said in one.said[0]


def test_a_method_of_an_object_alone_ends_sharing() -> None:
    one, (scheduler, classes) = Watched(), sglang()
    _bring_one_to_the_object(scheduler, classes)
    assert not one.meets(scheduler) and "load_new_weights is an attribute of the object" in one.said[0]


def test_a_hook_goes_around_an_unknown_method_where_it_can() -> None:
    scheduler, classes = sglang()

    def hook(path: str, name: str) -> None:
        owner = classes[path.rpartition(".")[2]]
        setattr(owner, name, heard(getattr(owner, name)))

    one = Watched(hook)
    _bring_one(scheduler, classes)
    assert one.meets(scheduler) and one.said == []


# ---------------------------------------------------------------------- pages


class Request:
    session = None


def slots(first: int, count: int) -> torch.Tensor:
    return torch.arange(first * 64, (first + count) * 64)


class Tree:
    """The insertions that SGLang makes, each with the node that it offers."""

    def __init__(self) -> None:
        self.weights = RunningWeights()
        self.fresh = Fresh(self.weights, most=8)
        self.weights.computed()

    def admitted(self) -> Request:
        request = Request()
        self.fresh.admitted(request)
        return request

    def offers(
        self, request: Request | None, pages: list[str], parent: str | None, *, at: int = 0, own: int | None = None,
        has_state: bool = False,
    ) -> bool:
        """`at`: the node's first slot; `own`: the request's, if other ones."""
        with self.fresh.inserting(request), self.fresh.adopting(slots(at if own is None else own, len(pages)), 0):
            return self.fresh.may_store(pages, parent, slots(at, len(pages)), has_state=has_state)


def test_without_a_change_everything_is_stored() -> None:
    assert Tree().offers(None, ["a"], UNKNOWN)


def test_after_a_change_only_what_a_new_request_computes_from_the_start_is_stored() -> None:
    tree = Tree()
    before = tree.admitted()
    tree.weights.changed()
    after = tree.admitted()
    assert not tree.offers(before, ["a"], START), "it ran across the change"
    assert not tree.offers(after, ["b"], "a"), "behind a page of before"
    assert not tree.offers(after, ["c"], UNKNOWN)
    assert not tree.offers(after, ["d"], START, at=5, own=9), "the tree had it"
    assert tree.offers(after, ["e", "f"], START) and tree.offers(after, ["g"], "f")
    assert tree.offers(before, ["g"], "f", at=5, own=9), "offered once more, by whoever comes by"
    assert not tree.offers(tree.admitted(), ["h"], "d")


def test_a_fresh_page_that_an_older_request_brings_anew_is_fresh_no_more() -> None:
    """The tree had evicted it."""
    tree = Tree()
    before = tree.admitted()
    tree.weights.changed()
    after = tree.admitted()
    assert tree.offers(after, ["a"], START)
    assert not tree.offers(before, ["a"], START, at=7)
    assert not tree.offers(after, ["b"], "a")


def test_a_state_that_an_older_request_brings_to_fresh_pages_is_not_stored() -> None:
    """Nor what is computed behind it."""
    tree = Tree()
    before = tree.admitted()
    tree.weights.changed()
    after = tree.admitted()
    assert tree.offers(after, ["a", "b"], START)
    assert tree.offers(after, ["a", "b"], START, own=9, has_state=True)
    assert not tree.offers(before, ["a", "b"], START, own=9, has_state=True)
    assert not tree.offers(after, ["c"], "b", at=2)


def test_the_next_change_begins_anew_and_a_flush_ends_it() -> None:
    tree = Tree()
    tree.weights.changed()
    request = tree.admitted()
    assert tree.offers(request, ["a"], START)
    tree.weights.changed()
    assert not tree.offers(request, ["b"], "a") and not tree.offers(tree.admitted(), ["b"], "a")
    tree.weights.flushed()
    assert tree.offers(tree.admitted(), ["b"], "a")


def test_a_session_goes_on_from_what_no_tree_has() -> None:
    tree = Tree()
    tree.weights.changed()
    request = Request()
    request.session = object()  # type: ignore[assignment]  # SGLang's
    tree.fresh.admitted(request)
    assert not tree.offers(request, ["a"], START)


def test_what_is_known_to_be_fresh_is_bounded() -> None:
    tree = Tree()
    tree.weights.changed()
    request = tree.admitted()
    for number in range(9):
        assert tree.offers(request, [str(number)], START)
    assert not tree.offers(request, ["more"], "0") and tree.offers(request, ["more"], "8")

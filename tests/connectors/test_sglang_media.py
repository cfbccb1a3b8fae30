"""Which of SGLang's requests with images are shared, and by which names: what the linker decides without SGLang."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import pytest
import torch

from kvdock.connectors.sglang.marks import MarkedPages
from kvdock.connectors.sglang.texts import Texts

VOCABULARY, PAGE = 600, 64
PAGES = [f"{at:064x}" for at in range(8)]
"""SGLang's hashes of a prompt's pages."""


class Format(Enum):
    NORMAL = 0
    PROCESSOR_OUTPUT = 1


class Item:
    """SGLang's MultimodalDataItem, as far as it is read here."""

    __struct_fields__ = (
        "modality", "hash", "pad_value", "offsets", "format", "feature", "precomputed_embeddings",
        "keep_device_embedding", "model_specific_data", "identity", "pad_values",
    )

    def __init__(self, feature: Any, first: int = 100, last: int = 103, **fields: Any) -> None:
        self.pad_values: tuple[int, ...] | None = None
        for name in self.__struct_fields__:
            setattr(self, name, None)
        self.modality, self.format, self.feature, self.offsets = Format.NORMAL, Format.NORMAL, feature, [(first, last)]
        self.hash, self.model_specific_data, self.kind = 7, {"image_grid_thw": torch.tensor([[1, 2, 2]])}, "image"
        vars(self).update(fields)
        if self.pad_values is None:
            self.pad_values = tuple(1_000_000 + self.hash * 10 + at for at in range(4))

    def is_image(self) -> bool:
        return self.kind == "image"

    def padding_values(self) -> tuple[int, ...]:
        assert self.pad_values is not None
        return self.pad_values

    def padding_sequence(self, length: int) -> list[int]:
        values = self.padding_values()
        return [values[at % len(values)] for at in range(length)]


class Inputs:
    """SGLang's MultimodalInputs, as far as it is read here."""

    def __init__(self, items: Sequence[Item], **fields: Any) -> None:
        self.mm_items, self.mrope_positions, self.mrope_position_delta = list(items), None, None
        self.im_token_id: int | None = 261
        vars(self).update(fields)


class Request:
    """SGLang's Req, as far as it is read here. `strays`: numbers of the prompt, by place, that stand for no item."""

    rid = "r"

    def __init__(
        self, *items: Item, tokens: int = 300, session: Any = None, strays: dict[int, int] | None = None,
        **fields: Any
    ) -> None:
        self.origin_input_ids = [5 + at % 90 for at in range(tokens)]
        for item in items:
            for first, last in item.offsets:
                self.origin_input_ids[first : last + 1] = item.padding_sequence(last + 1 - first)
        for at, number in (strays or {}).items():
            self.origin_input_ids[at] = number
        self.session, self.input_embeds, self.positional_embed_overrides = session, None, None
        self.multimodal_inputs = Inputs(items, **fields) if items else None


def texts(*, has_pairs: bool = False) -> Texts:
    return Texts(VOCABULARY, PAGE, has_pairs=has_pairs, hashes=True)


def bright() -> Any:
    return torch.full((4, 8), 0.5)


def names_of(shared: Texts, req: Request, pages: Sequence[str] = PAGES) -> list[str]:
    """Once its images are hashed."""
    assert shared.why_not(req) == ""
    shared._hashing.run(lambda: None).result(10)
    with shared.matching(req, 0):
        marked = shared.looked_up
    return list(pages) if marked is None else marked.named(pages, "")[0]


def alike(one: Request, other: Request, *, has_pairs: bool = False) -> int:
    """How many first pages have the same names in two engines."""
    first, second = names_of(texts(has_pairs=has_pairs), one), names_of(texts(has_pairs=has_pairs), other)
    return next((at for at in range(len(PAGES)) if first[at] != second[at]), len(PAGES))


def placed_at(first: int) -> Request:
    return Request(Item(bright(), first, first + 3))


@pytest.mark.parametrize(
    ("other", "pages"),
    [
        (lambda: Request(Item(bright())), 8),
        (lambda: Request(), 1),
        (lambda: Request(Item(bright() + 1)), 1),
        (lambda: Request(Item(bright().reshape(8, 4))), 1),
        (lambda: Request(Item(bright().double())), 1),
        (lambda: Request(Item(bright(), 100, 104)), 1),
        (lambda: Request(Item(bright(), model_specific_data={"image_grid_thw": torch.tensor([[1, 4, 1]])})), 1),
        (lambda: Request(Item(bright(), model_specific_data={})), 1),
        (lambda: Request(Item(bright()), Item(bright(), 200, 203)), 3),
        (lambda: Request(Item(bright()), im_token_id=262), 1),
    ],
)
def test_names_cover_all_that_an_image_shows_and_its_place(other: Callable[[], Request], pages: int) -> None:
    """The numbers in place of the tokens, and so SGLang's hashes, are the same in all of them."""
    assert alike(Request(Item(bright())), other()) == pages


def test_a_page_of_pairs_covers_the_token_behind_it() -> None:
    text, image = Request(), placed_at(128)
    assert alike(text, image) == 2
    assert alike(text, image, has_pairs=True) == 1


def test_names_behind_the_first_page_are_those_of_the_whole_prompt() -> None:
    """Asked for in any order, also for a page and the one before it."""
    shared, req = texts(), Request(Item(bright()))
    whole = names_of(shared, req)
    with shared.matching(req, 3):
        marked = shared.looked_up
    assert marked is not None
    assert marked.named(PAGES[3:5], PAGES[2]) == (whole[3:5], whole[2])
    assert marked.behind(1).named(PAGES[4:6], None) == (whole[4:6], None)
    assert marked._replace(first=1).named(PAGES[1:2], PAGES[0]) == (whole[1:2], PAGES[0])


def positions(tokens: int = 300, first: int = 100, shift: int = 0) -> dict[str, Any]:
    """The positions of a prompt with an image of four tokens, two by two."""
    table = torch.arange(tokens).repeat(3, 1)
    table[:, first : first + 4] = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]]) + first
    table[:, first + 4 :] -= 2 + shift
    return {"mrope_positions": table, "mrope_position_delta": torch.tensor([[-2 - shift]])}


def test_names_cover_positions_from_the_first_image_on() -> None:
    def asked(tokens: int = 300, **how: Any) -> Request:
        return Request(Item(bright()), tokens=tokens, **positions(tokens, **how))

    assert alike(asked(), asked()) == alike(asked(), asked(tokens=420)) == 8, "of tokens behind the prompt, too"
    assert alike(asked(), Request()) == alike(asked(), asked(shift=1)) == alike(asked(), Request(Item(bright()))) == 1
    uncounted = positions()
    uncounted["mrope_positions"][0, 3] += 1
    assert texts().why_not(Request(Item(bright()), **uncounted)) == "bypassed_media"
    assert texts().why_not(Request(Item(bright()), tokens=310, **positions())) == "bypassed_media"


@pytest.mark.parametrize(
    "req",
    [
        Request(Item(bright(), kind="video")),
        Request(Item(bright(), format=Format.PROCESSOR_OUTPUT)),
        Request(Item(bright()), session=object()),
        Request(strays={150: 1_000_070}),
        Request(Item(bright()), strays={150: 1_000_070}),
        Request(Item(bright()), strays={102: 9}),
        Request(Item(bright(), pad_values=(7, 8))),
        Request(Item(bright()), visible_frame_counts=torch.ones(2)),
    ],
    ids=["video", "processor output", "session", "numbers alone", "more numbers", "a token", "tokens", "other inputs"],
)
def test_what_is_not_certain_is_computed(req: Request) -> None:
    shared = texts()
    assert shared.why_not(req) == "bypassed_media"
    assert shared.offered(req, 0) == (False, None)


class OddTensor(torch.Tensor):
    """A kind of tensor that is not known."""

    def contiguous(self, *_: Any, **__: Any) -> Any:
        raise TypeError("it has no bytes")


@pytest.mark.parametrize(
    "item",
    [
        Item(None), Item(bright(), precomputed_embeddings=bright()), Item([bright(), bright().to("meta")]),
        Item(bright(), model_specific_data={"at": object()}), Item(bright().as_subclass(OddTensor)),
    ],
)
def test_an_image_that_cannot_be_hashed_is_computed_and_so_is_whatever_has_its_name(item: Item) -> None:
    shared, req = texts(), Request(item)
    assert not is_shared(shared, req)
    marks = shared.meet(req).marks
    assert marks is not None and marks.why_not() == "media", "it is not waited for"
    assert not is_shared(shared, Request(Item(bright())))
    assert is_shared(shared, Request(Item(bright(), hash=8)))


def is_shared(shared: Texts, req: Request) -> bool:
    """Whether it may be stored once its images are hashed."""
    shared.meet(req)
    shared._hashing.run(lambda: None).result(10)
    return shared.offered(req, 0)[0]


def test_a_name_is_trusted_as_long_as_it_has_had_one_content() -> None:
    shared = texts()
    first, again, other = Request(Item(bright())), Request(Item(bright())), Request(Item(bright() + 1))
    assert is_shared(shared, first) and is_shared(shared, again)
    assert not is_shared(shared, other)
    assert not is_shared(shared, first) and not is_shared(shared, again)
    assert is_shared(shared, Request(Item(bright(), hash=8)))


def test_a_name_is_not_trusted_while_another_image_of_it_is_hashed() -> None:
    shared, first = texts(), Request(Item(bright()))
    assert is_shared(shared, first)
    assert shared._media is not None
    shared._media._run = lambda *call: None
    shared.meet(Request(Item(bright())))
    assert not shared.offered(first, 0)[0]


def test_one_number_that_two_names_share_is_not_trusted() -> None:
    """As if two names gave the same number."""
    shared = texts()
    one, other = Item(bright()), Item(bright() + 1, hash=8, pad_values=(2_000_000, 1_000_070))
    assert is_shared(shared, Request(one)) and not is_shared(shared, Request(other))
    assert not is_shared(shared, Request(one))


def test_what_sglang_keeps_of_all_images_of_a_request_has_a_name_too() -> None:
    shared = texts()
    pair = Request(Item(bright()), Item(bright() + 1, 200, 203, hash=8))
    assert is_shared(shared, pair)
    shared.meet(Request(Item(bright() + 2, hash=hash((7, 8)), pad_values=(3_000_000,))))
    assert not is_shared(shared, pair)


def test_numbers_of_a_text_are_not_trusted() -> None:
    shared = texts()
    assert is_shared(shared, Request(Item(bright())))
    shared.meet(Request(strays={3: 1_000_071}))
    assert not is_shared(shared, Request(Item(bright())))


def test_an_item_in_the_place_of_tokens_keeps_texts_from_being_shared_until_a_flush() -> None:
    shared, text = texts(), Request()
    assert shared.offered(text, 0) == (True, None)
    shared.meet(Request(Item(bright(), pad_values=(7, 8))))
    assert shared.why_not(text) == shared.why_not(Request()) == "bypassed_media"
    assert shared.offered(text, 0) == (False, None)
    shared.flushed()
    assert shared.offered(text, 0) == (True, None)


def test_pages_have_no_names_before_the_image_is_hashed() -> None:
    shared, req = texts(), Request(Item(bright()))
    runs: list[tuple[Any, ...]] = []
    assert shared._media is not None
    shared._media._run = lambda *call: runs.append(call)
    with shared.matching(req, 0):
        marked = shared.looked_up
    assert isinstance(marked, MarkedPages)
    assert (marked.marks.why_not(), marked.named(PAGES, PAGES[0])) == ("unready", ([], None))
    assert shared.offered(req, 0)[0] is False
    ((work, *arguments),) = runs
    work(*arguments)
    assert marked.marks.why_not() == "" and len(marked.named(PAGES, "")[0]) == len(PAGES)


def test_a_request_is_remembered_after_sglang_has_dropped_its_images_and_no_longer() -> None:
    shared, req = texts(), Request(Item(bright()))
    assert is_shared(shared, req) and req.multimodal_inputs is not None
    feature = weakref.ref(req.multimodal_inputs.mm_items[0].feature)
    req.multimodal_inputs.mm_items[0].feature = None
    req.multimodal_inputs = None
    assert shared.offered(req, 0)[0] and feature() is None
    gone = weakref.ref(req)
    del req
    assert gone() is None


def test_an_engine_that_reads_text_alone_shares_no_images() -> None:
    shared = Texts(None, PAGE, has_pairs=False, hashes=True)
    assert shared.why_not(Request(Item(bright()))) == "bypassed_media"
    assert shared.why_not(Request()) == "" and shared.offered(None, None) == (True, None)
    assert texts().offered(None, 0) == (False, None)

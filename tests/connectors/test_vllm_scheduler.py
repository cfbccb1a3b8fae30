"""Which blocks vLLM's scheduler process offers to store, after preemption, resets and late servers. vLLM's own part is
played by hand, step by step; the server is real."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any

import pytest
from api_helpers import PATIENCE_S, ServerProcess, eventually, manifest, unique
from kv_readers import streamed

from kvdock.client.client import Client
from kvdock.client.events import read_events
from kvdock.client.transport import Address
from kvdock.connectors import waits as waits_module
from kvdock.connectors.plans import LoadPiece, LoadPlan
from kvdock.connectors.session import EngineSession, Identity, ServerEpoch
from kvdock.connectors.vllm.block_names import Namer
from kvdock.connectors.vllm.groups import KVGroup
from kvdock.connectors.vllm.scheduler import EngineView, VllmScheduler
from kvdock.connectors.vllm.setup import Settings
from kvdock.connectors.vllm.steps import NOWHERE, LoadOrder, Orders, Report
from kvdock.connectors.vllm.tables import BlockBudget, InFlight, Tracked
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import PatchConfig
from kvdock.protocol.kv_events import named
from kvdock.protocol.schemas import Group

BLOCK, CHUNK = 16, 32
FULL, WINDOW = KVGroup(None, BLOCK, {"a": 128}, False), KVGroup(24, BLOCK, {"b": 128}, False)
STATE = KVGroup(1, CHUNK, {"b": 128}, False, state="mamba")


def scheduler_of(
    address: str, *groups: KVGroup, steps_ahead: int = 0, block_tokens: int = BLOCK, namer: Namer | None = None
) -> VllmScheduler:
    described = manifest(
        chunk_tokens=CHUNK, block_tokens=block_tokens, cache_salt=unique("salt"), groups=tuple(
            Group(part_bytes=256, block_tokens=group.block_tokens) if group.window_tokens is None
            else Group(
                kind="window", window_tokens=group.window_tokens, part_bytes=256, block_tokens=group.block_tokens
            ) for group in groups
        ),
    )
    session = EngineSession(
        Client(address), described, Identity(unique("instance"), unique("member"), ranks=(), scheduler=True)
    )
    budget = BlockBudget(groups, blocks=100, longest_tokens=1024, step_tokens=64)
    return VllmScheduler(
        session, EngineView(groups, steps_ahead=steps_ahead, namer=namer), budget, Settings(address=address)
    )


@pytest.fixture
def scheduler(server: ServerProcess) -> Iterator[VllmScheduler]:
    made = scheduler_of(server.unix, FULL)
    made.start()
    yield made
    made.close()


def request_of(tokens: int) -> Any:
    return SimpleNamespace(
        request_id="r", prompt_token_ids=[1] * tokens, all_token_ids=[1] * tokens, num_tokens=tokens,
        num_prompt_tokens=tokens, num_output_tokens=0, max_tokens=0, num_computed_tokens=0,
    )


def step(
    scheduler: VllmScheduler, request: Any, tokens: int = 0, *, new: Sequence[Sequence[int | None]] | None = None,
    more: Sequence[Sequence[int]] | None = None, resumed: bool = False, preempted: bool = False,
    states: Sequence[tuple[int, int, int]] = (),
) -> Orders:
    """Computes `tokens` of the request. `new`: its blocks when it is scheduled for the first time; `more`: those it
    grows into, or all of them when it is resumed. `states`: those that vLLM hands over."""
    orders = scheduler.build(SimpleNamespace(
        preempted_req_ids={request.request_id} if preempted else None,
        scheduled_new_reqs=[SimpleNamespace(req_id=request.request_id, block_ids=new)] if new is not None else [],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[request.request_id] if more is not None else [], new_block_ids=[more] if more is not None else [],
            resumed_req_ids={request.request_id} if resumed else set(),
        ),
        num_scheduled_tokens={request.request_id: tokens} if tokens else {}, finished_req_ids=set(),
        kv_connector_block_state=SimpleNamespace(boundary_state_offloads={request.request_id: states}),
    ))
    request.num_computed_tokens += tokens
    return orders


@pytest.fixture
def full() -> Iterator[ServerProcess]:
    """It has no room for a store, until make_room()."""
    with ServerProcess(session_cap=1e-9) as made:
        yield made


def make_room(server: ServerProcess) -> None:
    with Client(server.unix) as client:
        client.configure(PatchConfig(session_cap=0.5))


def await_reserved(scheduler: VllmScheduler) -> None:
    """The server has answered for each store under way, whether it has room or not."""
    eventually(lambda: len(scheduler._stores._reserved) == len(offered(scheduler)))


def offered(scheduler: VllmScheduler) -> list[set[int]]:
    """The blocks of each store under way, oldest first."""
    return [set(blocks) for blocks in scheduler._stores]


def test_a_resumed_request_is_stored_from_its_new_blocks(scheduler: VllmScheduler) -> None:
    request = request_of(96)
    scheduler.lookup(request, 0)
    scheduler.allocated(request, [[1, 2, 3, 4]], 0)
    step(scheduler, request, 64, new=[[1, 2, 3, 4]])
    assert offered(scheduler) == [{1, 2, 3, 4}]
    step(scheduler, request, preempted=True)
    request.num_computed_tokens = 0
    scheduler.lookup(request, 0)
    scheduler.allocated(request, [[11, 12, 13, 14, 15]], 0)
    step(scheduler, request, 80, more=[[11, 12, 13, 14, 15]], resumed=True)
    step(scheduler, request, 16, more=[[16]])  # over another chunk's end
    assert offered(scheduler)[-1] == {15, 16}


def test_the_trace_of_a_request_goes_with_its_lookup_and_its_store() -> None:
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with ServerProcess() as server:
        scheduler = scheduler_of(server.unix, FULL)
        scheduler.start()
        for number, headers in enumerate(({"traceparent": traceparent, "tracestate": "a=1"}, {"traceparent": "no"})):
            request = request_of(96)
            request.request_id, request.trace_headers = f"r{number}", headers
            request.all_token_ids = [number] * 96
            blocks: list[list[int | None]] = [[10 * number + at for at in range(1, 5)]]
            scheduler.lookup(request, 0)
            scheduler.allocated(request, blocks, 0)
            step(scheduler, request, 64, new=blocks)

        def told() -> list[tuple[str, str, str]]:
            events = [one.event for one in read_events(Address.parse(server.unix), kinds="looked_up,reserved")]
            return sorted((one["kind"], one.get("request", ""), one["traceparent"]) for one in events)

        wanted = [("looked_up", "r0", traceparent), ("looked_up", "r1", "")]
        eventually(lambda: told() == [*wanted, ("reserved", "", ""), ("reserved", "", traceparent)])
        scheduler.close()


def test_a_server_that_tells_routers_hears_what_they_know_chunks_by() -> None:
    """But of what depends on more than tokens, and of what vLLM has not hashed yet, it hears nothing."""
    with ServerProcess(observe="stream,kv_events") as server, Client(server.unix) as client:
        scheduler = scheduler_of(server.unix, FULL, namer=lambda request, at: None if at >= request.hashed else named(
            request.hashes if at else None, [request.hashes + 2 * at, request.hashes + 2 * at + 1],
            request.all_token_ids[at * CHUNK : (at + 1) * CHUNK],
        ))
        scheduler.start()
        for number, (hashed, salt) in enumerate(((2, ""), (2, "a tenant's"), (1, ""))):
            request = request_of(96)
            request.request_id, request.hashes, request.cache_salt = f"r{number}", 100 * (number + 1), salt
            request.hashed = hashed
            request.all_token_ids = [number] * 96
            blocks: list[list[int | None]] = [[10 * number + at for at in range(1, 5)]]
            scheduler.lookup(request, 0)
            scheduler.allocated(request, blocks, 0)
            step(scheduler, request, 64, new=blocks)

        def reserved() -> list[str]:
            events = (one.event for one in read_events(Address.parse(server.unix), kinds="reserved"))
            return [one["reservation"] for one in events if one["chunks"] == 2]

        eventually(lambda: len(reserved()) == 3)
        attachment = scheduler._session.attachment
        assert attachment is not None and attachment.wants_blocks
        for reservation in reserved():  # the workers' part
            parts = [s.PartDone(at, 0, "0" * 15 + "1") for at in range(2)]
            client.commit(reservation, s.Commit(session=attachment.session, rank=0, parts=parts))

        def told() -> list[dict[str, Any]]:
            return [event for _, body in streamed(server) for event in body["events"][1:]]

        eventually(lambda: len(told()) == 6)
        by_tokens = {tuple(one["token_ids"]): one for one in told() if one["token_ids"]}
        assert by_tokens.keys() == {(0,) * CHUNK}, "chunks of equal tokens, one behind the other"
        told_hashes = [one["block_hashes"] for one in told() if one["token_ids"]]
        assert told_hashes == [[f"{100 + at:016x}", f"{101 + at:016x}"] for at in (0, 2)]
        scheduler.close()


def test_blocks_that_a_window_left_behind_are_not_stored_late(server: ServerProcess) -> None:
    """The server comes when vLLM has given the window's first blocks to others."""
    scheduler = scheduler_of(server.unix, FULL, WINDOW)
    request = request_of(96)
    scheduler.allocated(request, [[1, 2, 3, 4], [11, 12, 13, 14]], 0)
    step(scheduler, request, 64, new=[[1, 2, 3, 4], [11, 12, 13, 14]])
    assert offered(scheduler) == [], "nobody is there"
    scheduler.start()
    step(scheduler, request, 32, more=[[5, 6], [15, 16]])
    assert set().union(*offered(scheduler)) == {1, 2, 3, 4, 5, 6, 13, 14, 15, 16}
    scheduler.close()


@pytest.fixture
def recurrent(server: ServerProcess) -> Iterator[VllmScheduler]:
    made = scheduler_of(server.unix, FULL, STATE, block_tokens=CHUNK)
    made.start()
    yield made
    made.close()


def test_a_state_is_stored_where_a_step_ends_or_begins_at_the_boundary_of_its_block(recurrent: VllmScheduler) -> None:
    request = request_of(224)
    table: list[list[int | None]] = [[*range(1, 15)], [21, 22]]
    recurrent.allocated(request, table, 0)
    step(recurrent, request, 40, new=table)
    assert offered(recurrent) == [{1, 2}], "a step that went beyond: what the block holds is not the state at its end"
    step(recurrent, request, 24)
    assert offered(recurrent)[-1] == {3, 4, 22}
    step(recurrent, request, 50, more=[[], [0, 23]])
    assert offered(recurrent)[-1] == {5, 6}, "the block that steps are still writing is another one"
    recurrent.finished(request, has_answered=True)
    assert set().union(*offered(recurrent)) == {1, 2, 3, 4, 5, 6, 22}


def test_a_state_whose_tokens_are_known_a_step_late_is_stored_then(recurrent: VllmScheduler) -> None:
    request = request_of(63)
    table: list[list[int | None]] = [[1, 2, 3, 4], [21, 22]]
    recurrent.allocated(request, table, 0)
    step(recurrent, request, 63, new=table)
    assert offered(recurrent) == [{1, 2}]
    step(recurrent, request, 1)  # of a token that the step before makes
    assert offered(recurrent) == [{1, 2}]
    request.all_token_ids, request.num_tokens = [1] * 64, 64
    step(recurrent, request, 1, more=[[5], [23]])
    assert offered(recurrent)[-1] == {3, 4, 22}


def test_a_state_that_vllm_hands_over_is_stored_if_it_is_where_it_is_said_to_be(recurrent: VllmScheduler) -> None:
    there, elsewhere = [(1, 22, 64)], [(1, 23, 64), (0, 22, 64)]
    for states, stored in ((there, [{1, 2}, {3, 4, 22}]), (elsewhere, [{1, 2, 3, 4}])):
        request = request_of(80)
        request.request_id = unique("r")
        request.all_token_ids[0] = len(states)
        table: list[list[int | None]] = [[1, 2, 3, 4, 5], [21, 22, 23]]
        before = len(offered(recurrent))
        recurrent.allocated(request, table, 0)
        step(recurrent, request, 80, new=table, states=states)
        assert offered(recurrent)[before:] == stored


def test_a_request_whose_load_is_under_way_at_a_reset_is_not_stored(scheduler: VllmScheduler) -> None:
    """What it computes may rest on what was cleared."""
    request = request_of(96)
    scheduler.lookup(request, 0)
    scheduler.allocated(request, [[1, 2, 3, 4]], 32)
    assert scheduler.reset()
    step(scheduler, request, 64, new=[[1, 2, 3, 4]])
    assert offered(scheduler) == []
    again = request_of(96)
    again.request_id = "again"
    eventually(lambda: scheduler.lookup(again, 0) == (0, False))
    scheduler.allocated(again, [[5, 6, 7, 8]], 0)
    step(scheduler, again, 64, new=[[5, 6, 7, 8]])
    assert offered(scheduler) == [{5, 6, 7, 8}], "requests that come after the reset are stored"


def test_reports_of_ranks_add_up_and_a_load_counts_as_far_as_in_the_rank_that_got_least() -> None:
    one = Report({"r": 64, "one": 32}, Counter({"s": 1}), {0: ServerEpoch("p", "s")})
    one.add(Report({"r": 32, "other": 0}, Counter({"s": 1, "t": 1})))
    assert one.valid_tokens == {"r": 32, "one": 32, "other": 0}
    one.add(Report(took_s={"quick": (32, 0.1), "slow": (64, 0.2)}))
    one.add(Report(took_s={"quick": (32, 0.05), "slow": (64, 0.5)}))
    assert one.took_s == {"quick": (32, 0.1), "slow": (64, 0.5)}
    assert one.stores == Counter({"s": 2, "t": 1}) and one.epochs == {0: ServerEpoch("p", "s")}
    late = Report({"r": 0})
    late.add(one)
    assert late.valid_tokens["r"] == 0


def test_steps_do_not_wait_for_a_slow_servers_slots_once_it_is_known_to_be_late(
    full: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What found no room is offered once more when its request ends, and the next step may wait for that."""
    scheduler, waited, go = scheduler_of(full.unix, FULL), list[float](), threading.Event()
    scheduler.start()
    reserve = scheduler._session.client.reserve

    def slow(body: Any) -> Any:
        go.wait(PATIENCE_S)
        return reserve(body)

    def counted(futures: list[Future[None]], timeout_s: float) -> object:
        waited.append(timeout_s)
        return wait(futures, timeout_s)

    monkeypatch.setattr(waits_module, "wait", counted)
    scheduler._session.client.reserve = slow  # type: ignore[method-assign,assignment]  # the real one, later
    patience = scheduler._connector.lookups.waits.patience
    assert patience is not None
    patience.is_open = True
    for number in range(10):
        request = request_of(64)
        request.request_id = f"r{number}"
        scheduler.allocated(request, [[1, 2, 3, 4]], 0)
        step(scheduler, request, 64, new=[[1, 2, 3, 4]])
        go.set()
        await_reserved(scheduler)
        go.clear()
        scheduler.finished(request, has_answered=False)
        assert scheduler._stores.last is not None and not scheduler._stores.last.done()
    go.set()
    scheduler.close()
    assert waited == []


def test_a_step_shows_the_speed_unless_each_of_its_prompts_is_a_short_rest_behind_a_hit(
    scheduler: VllmScheduler
) -> None:
    request = request_of(4096)
    scheduler.lookup(request, 1024)
    scheduler.allocated(request, [list(range(1, 257))], 0)
    assert [scheduler._prefill_tokens({"r": tokens}) for tokens in (1023, 1024)] == [0, 1024]
    assert scheduler._prefill_tokens({"r": 100, "without a hit": 200, "decodes": 1}) == 300


# ---------------------------------------------------------------------- stores and loads of the same blocks

def test_a_store_holds_up_the_load_of_its_blocks_and_no_step_before_that_request_runs(scheduler: VllmScheduler) -> None:
    writer, reader = request_of(65), request_of(64)
    writer.request_id = "writer"
    reader.all_token_ids = [2] * 64
    scheduler.allocated(writer, [[1, 2, 3, 4, 5]], 0)
    step(scheduler, writer, 65, new=[[1, 2, 3, 4, 5]])
    eventually(lambda: bool(scheduler._stores._reserved))
    stored = step(scheduler, writer, 1).stores
    scheduler.finished(writer, has_answered=True)
    assert [order.plan.tokens for order in stored] == [64]
    scheduler.arrived(reader)
    scheduler.lookup(reader, 0)
    scheduler._tracked["r"].is_async = True  # as if it had found two chunks
    scheduler.allocated(reader, [[3, 4, 6, 7]], 64)
    orders = step(scheduler, reader)
    assert [load.after for load in orders.loads] == [(stored[0].store_id,)] and orders.fences == ()
    assert step(scheduler, reader, 64, new=[[3, 4, 6, 7]]).fences == (stored[0].store_id,), "now a step writes them"


@pytest.mark.parametrize("more_steps", [0, 2])
def test_what_was_computed_long_ago_is_stored_beside_steps_under_way(full: ServerProcess, more_steps: int) -> None:
    """The chunks that are stored when the request ends, of which the newest step may be under way."""
    scheduler, request = scheduler_of(full.unix, FULL, steps_ahead=1), request_of(99)
    scheduler.start()
    scheduler.allocated(request, [[1, 2, 3, 4, 5, 6, 7]], 0)
    step(scheduler, request, 64, new=[[1, 2, 3, 4, 5, 6, 7]])
    for tokens in (32, *[1] * more_steps):
        await_reserved(scheduler)
        step(scheduler, request, tokens)
    await_reserved(scheduler)
    make_room(full)
    scheduler.finished(request, has_answered=True)
    await_reserved(scheduler)
    assert [(order.plan.tokens, order.waits) for order in step(scheduler, request).stores] == [(96, more_steps == 0)]
    scheduler.close()


def test_what_was_there_before_a_request_ran_may_be_a_load_that_ends_with_its_first_step() -> None:
    tracked = Tracked(None)
    assert tracked.computed_in(32) is None
    tracked.steps.extend([(7, 64), (8, 70), (9, 71)])
    assert [tracked.computed_in(tokens) for tokens in (32, 64, 65, 70, 71, 72)] == [7, 7, 7, 7, 8, 9]


# ---------------------------------------------------------------------- steps under way

STEPS = 3


def ordered(scheduler: VllmScheduler, *blocks: int, skip: int = 0) -> LoadOrder:
    plan = LoadPlan("l", "lease", 0, CHUNK, CHUNK, (LoadPiece(0, 0, (), blocks, skip),))
    return scheduler._ordered(LoadOrder(NOWHERE, plan, is_async=True))


def waits(scheduler: VllmScheduler, *blocks: int, skip: int = 0) -> bool:
    return ordered(scheduler, *blocks, skip=skip).waits


@pytest.fixture
def ahead(server: ServerProcess) -> Iterator[VllmScheduler]:
    """Plans while STEPS steps may be under way."""
    made = scheduler_of(server.unix, FULL)
    made._next.in_flight = InFlight(STEPS, keeps_back=False)
    yield made  # never started: it stores nothing
    made._session.client.close()


def test_a_load_comes_after_a_step_that_writes_its_blocks(ahead: VllmScheduler) -> None:
    request = request_of(64)
    ahead.allocated(request, [[1, 2, 3, 4]], 0)
    step(ahead, request, 32, new=[[1, 2, 3, 4]])
    assert waits(ahead, 1) and waits(ahead, 9, 4) and not waits(ahead, 9)
    assert not waits(ahead, 1, 9, skip=1), "what is skipped is not written"
    for _ in range(STEPS):
        step(ahead, request, 4)
    assert waits(ahead, 3) and not waits(ahead, 1), "32 tokens were computed before, which fill two blocks"


def test_a_load_comes_after_steps_that_a_preempted_request_was_in(ahead: VllmScheduler) -> None:
    request = request_of(64)
    ahead.allocated(request, [[1, 2, 3, 4]], 0)
    step(ahead, request, 60, new=[[1, 2, 3, 4]])
    for _ in range(STEPS):
        step(ahead, request, 1)
    assert not waits(ahead, 1)
    request.num_computed_tokens = 0
    step(ahead, request, preempted=True)
    assert waits(ahead, 1)


def test_a_load_comes_after_a_step_whose_blocks_are_not_known(ahead: VllmScheduler) -> None:
    request = request_of(64)
    step(ahead, request, 1, more=[[1]])
    assert waits(ahead, 9)


def test_a_load_comes_after_a_step_that_reads_what_the_window_leaves_behind_next(server: ServerProcess) -> None:
    scheduler, request = scheduler_of(server.unix, FULL, WINDOW), request_of(160)
    scheduler._next.in_flight = InFlight(STEPS, keeps_back=False)
    scheduler.allocated(request, [[*range(1, 11)], [*range(11, 21)]], 0)
    step(scheduler, request, 96, new=[[*range(1, 11)], [*range(11, 21)]])
    for _ in range(STEPS):
        step(scheduler, request, 1)
    assert waits(scheduler, 16) and not waits(scheduler, 6), "tokens 80 to 95: the window of 24 reads them"
    assert not waits(scheduler, 14)
    scheduler._session.client.close()


def test_a_load_comes_after_stores_that_still_read_its_blocks(server: ServerProcess) -> None:
    scheduler, request = scheduler_of(server.unix, FULL), request_of(64)
    scheduler._next.in_flight = InFlight(STEPS, keeps_back=False)
    scheduler.start()
    scheduler.allocated(request, [[1, 2, 3, 4]], 0)
    step(scheduler, request, 64, new=[[1, 2, 3, 4]])
    eventually(lambda: bool(scheduler._stores._reserved))
    scheduler.finished(request, has_answered=False)
    other = request_of(8)
    other.request_id = "other"
    scheduler.allocated(other, [[5]], 0)
    for _ in range(STEPS + 1):
        step(scheduler, other, 1, more=[[]])
    assert ordered(scheduler, 2).after and not ordered(scheduler, 6).after, "no worker has said that it ended"
    assert not waits(scheduler, 2), "of the steps under way none writes it"
    scheduler.close()


def test_what_a_request_that_ends_in_an_error_has_not_sent_is_not_stored(scheduler: VllmScheduler) -> None:
    request, other = request_of(96), request_of(96)
    other.request_id, other.all_token_ids = "other", [2] * 96
    for one, blocks in ((other, [5, 6, 7, 8]), (request, [1, 2, 3, 4])):
        scheduler.allocated(one, [[*blocks]], 0)
        step(scheduler, one, 64, new=[blocks])
    scheduler.finished(request, has_answered=False, has_failed=True)
    dropped = {store.request_id: store.is_dropped for store in scheduler._stores._stores.values()}
    assert dropped == {"other": False, "r": True}


def computed(scheduler: VllmScheduler, request_id: str, local_tokens: int, blocks: list[int | None]) -> list[set[int]]:
    """The stores that begin when a request of two chunks is computed behind `local_tokens`."""
    request, before = request_of(96), len(offered(scheduler))
    request.request_id = request_id
    scheduler.lookup(request, local_tokens)
    scheduler.allocated(request, [blocks], 0)
    request.num_computed_tokens = local_tokens
    step(scheduler, request, 64 - local_tokens, new=[blocks])
    return offered(scheduler)[before:]


@pytest.mark.weights
def test_what_was_computed_before_a_change_is_not_stored_after_it(scheduler: VllmScheduler) -> None:
    request = request_of(96)
    scheduler.lookup(request, 0)
    scheduler.allocated(request, [[1, 2, 3, 4]], 0)
    step(scheduler, request, 32, new=[[1, 2, 3, 4]])
    assert offered(scheduler) == [{1, 2}]
    assert step(scheduler, request, 16).weights == 0
    scheduler.weights_change("changed")
    orders = step(scheduler, request, 16)
    assert (orders.weights, orders.loads) == (1, ())
    assert not any({3, 4} & blocks for blocks in offered(scheduler)), "its first tokens are of other weights"
    assert scheduler.finished(request, has_answered=True) is None
    assert not any({3, 4} & blocks for blocks in offered(scheduler))


@pytest.mark.weights
def test_behind_kv_of_earlier_weights_nothing_is_stored_or_looked_up(scheduler: VllmScheduler) -> None:
    scheduler._weights.computed()
    scheduler.weights_change("changed")
    assert computed(scheduler, "behind a local hit", 32, [1, 2, 3, 4]) == []
    assert computed(scheduler, "from its first token", 0, [5, 6, 7, 8]) == [{5, 6, 7, 8}]
    scheduler.weights_change("flushed")
    assert computed(scheduler, "once flushed", 32, [9, 10, 11, 12]) != []


@pytest.mark.weights
@pytest.mark.parametrize("kind", ["begin", "unheard"])
def test_while_weights_are_not_known_nothing_is_stored(scheduler: VllmScheduler, kind: str) -> None:
    scheduler.weights_change(kind, "a plug-in has taken a place")
    assert computed(scheduler, "meanwhile", 0, [1, 2, 3, 4]) == []
    scheduler.weights_change("end" if kind == "begin" else "heard")
    scheduler.weights_change("flushed")
    assert computed(scheduler, "afterwards", 0, [5, 6, 7, 8]) == [{5, 6, 7, 8}]


@pytest.mark.weights
def test_a_worker_that_heard_of_a_change_alone_is_believed_once(scheduler: VllmScheduler) -> None:
    scheduler.take(Report(wrote_weights={0}))
    assert scheduler._weights.epoch == 1
    scheduler.take(Report(wrote_weights={0}))  # what it says of the step before is no other change
    assert scheduler._weights.epoch == 1


@pytest.mark.weights
def test_a_reset_after_a_change_clears_nothing_at_the_server(
    scheduler: VllmScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[int] = []

    def ask(*more: object) -> bool:
        cleared.append(1)
        return True

    monkeypatch.setattr(scheduler._resets.clearing, "ask", ask)
    assert scheduler.reset() and len(cleared) == 1
    scheduler.weights_change("changed")
    assert scheduler.reset() and len(cleared) == 1, "what other engines share stays"
    assert scheduler.reset() and len(cleared) == 2

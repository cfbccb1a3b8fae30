"""Adapters by their files: which are known for sure, what is said of the others, and who hears of their loads."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvdock.connectors.vllm.adapters import CLOCK_TICK_NS, Adapter, AdapterLoads, Adapters, look_at
from kvdock.connectors.vllm.arrivals import CORE

LATER_NS = 10**12


def written(folder: Path, content: str = "a") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(content)
    return folder


def asked(path: object, name: str = "sql", number: int = 1, **more: Any) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), **more)


def run_now(function: Callable[..., None], *arguments: Any) -> Any:
    function(*arguments)


def changed_ns(folder: Path) -> int:
    found = look_at(folder)
    assert found is not None
    return found.changed_ns


def adapters(
    *, began_ns: int = 0, hears: bool = True, now_ns: int | None = None, snapshot: Path | None = None, **more: Any
) -> Adapters:
    """`now_ns`: one moment, long after everything if not given."""
    return Adapters(
        run_now, began_ns, hears=lambda: hears, find_snapshot=lambda *_: snapshot,
        now_ns=lambda: now_ns if now_ns is not None else 1 << 62, **more,
    )


def test_an_adapter_written_after_the_start_is_known_if_it_was_met_before_vllm_read_it(tmp_path: Path) -> None:
    one, other = written(tmp_path / "one"), written(tmp_path / "other", "b")
    heard, unheard = adapters(), adapters(hears=False)
    late = heard.meet(asked(one))
    assert late.is_sound and heard.check(late, 1) and late.digest not in (None, heard.meet(asked(other, "b", 2)).digest)
    missed = unheard.meet(asked(one))
    assert not missed.is_sound and missed.digest is None and "since this engine started" in missed.why
    old = adapters(hears=False, began_ns=1 << 62).meet(asked(one))
    assert old.is_sound and old.digest == late.digest, "who started later knows it all the same"


def test_files_that_were_written_a_moment_ago_get_a_tick_of_the_clock(tmp_path: Path) -> None:
    folder = written(tmp_path / "one")
    now_ns, slept = [changed_ns(folder)], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now_ns[0] += int(seconds * 1e9)
        if len(slept) == 2:
            (folder / "adapter_model.safetensors").write_text("b")
            now_ns[0] = changed_ns(folder)

    def fresh() -> Adapter:
        return Adapters(run_now, 0, hears=lambda: True, now_ns=lambda: now_ns[0], sleep=sleep).meet(asked(folder))

    assert fresh().is_sound and slept == [pytest.approx((CLOCK_TICK_NS + 10**6) / 1e9)]
    now_ns[0] = changed_ns(folder)
    assert not fresh().is_sound, "it was written again meanwhile, so nothing is known of this tick"
    now_ns[0] = changed_ns(folder) + CLOCK_TICK_NS + 1
    assert fresh().is_sound and len(slept) == 2, "and nobody waits for older ones"


def test_a_hubs_name_is_known_by_the_files_in_the_hubs_cache(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--sql"
    snapshot = written(cache / "snapshots" / "abc")
    main = cache / "refs" / "main"
    main.parent.mkdir()
    main.write_text("abc")
    known = adapters(snapshot=snapshot)
    by_name, by_path = known.meet(asked("org/sql")), known.meet(asked(snapshot, "local", 2))
    assert by_name.is_sound and by_name.digest == by_path.digest is not None
    main.write_text("abd")  # vLLM has asked the hub, and downloaded another commit
    assert not known.check(by_name, 1) and known.check(by_path, 1)
    missing = adapters(snapshot=None).meet(asked("org/sql"))
    assert not missing.is_sound and "download it before it is loaded" in missing.why


@pytest.mark.parametrize(("spoil", "why"), [
    (lambda folder, known: (folder / "adapter_model.safetensors").write_text("other"), "its files have changed: give"),
    (lambda folder, known: (folder / "adapter_config.json").unlink(), "its files have changed: give each"),
    (lambda folder, known: known.meet(asked(written(folder / "second"))), "and for .*second: give each folder a name"),
    (lambda folder, known: known.meet(asked(folder, "query")), "its number 1 stands for sql and for query"),
])
def test_an_adapter_that_is_another_one_by_now_is_told_of_once(
    spoil: Callable[[Path, Adapters], object], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, known = written(tmp_path / "sql"), adapters()
    adapter = known.meet(asked(folder))
    known.log(adapter)
    assert known.check(adapter, 1) and not caplog.messages
    spoil(folder, known)
    assert not known.check(adapter, 2)
    for _ in range(2):
        known.log(adapter)
    (said,) = caplog.messages
    assert said.startswith("what is computed with the adapter sql is not cached: ")
    assert re.search(why, said)


def test_what_tensorizer_loads_and_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    folder = written(tmp_path / "sql")
    assert "tensorizer" in adapters().meet(asked(folder, tensorizer_config_dict={"a": 1})).why
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").mkdir()
    assert "cannot be read" in adapters().meet(asked(folder)).why


def test_a_change_is_seen_while_steps_that_used_the_adapter_may_be_stored(tmp_path: Path) -> None:
    folder, idle = written(tmp_path / "sql"), written(tmp_path / "idle")
    known = adapters()
    adapter, other = known.meet(asked(folder)), known.meet(asked(idle, "idle", 2))
    assert known.check(adapter, 20) and not known.lost(21)
    for changed in (folder, idle):
        (changed / "adapter_model.safetensors").write_text("other")
    assert known.lost(22) and not known.lost(23), "once"
    assert other.is_sound, "no request had it lately: it is looked at when one has"
    assert not known.check(other, 24)


class Core:
    """A core of vLLM, as far as adapters go."""

    def __init__(self, connector: Any) -> None:
        self.scheduler = SimpleNamespace(connector=connector)
        self.done: list[object] = []

    def add_lora(self, lora_request: Any) -> bool:
        self.done.append(lora_request)
        return True

    def collective_rpc(self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = ()) -> str:
        return "answer"


class Connector:
    def __init__(self) -> None:
        self.core: Core | None = None
        self.met: list[tuple[object, int]] = []

    def kvdock_adapter(self, asked: Any) -> None:
        assert self.core is not None
        self.met.append((asked, len(self.core.done)))


@pytest.fixture
def core_class(monkeypatch: pytest.MonkeyPatch) -> type[Core]:
    """Another class for each test, which is wrapped."""
    made = type("EngineCore", (Core,), {name: vars(Core)[name] for name in ("add_lora", "collective_rpc")})
    module = ModuleType(CORE)
    module.EngineCore = made  # type: ignore[attr-defined]  # a module made here
    monkeypatch.setitem(sys.modules, CORE, module)
    return made


def test_connectors_meet_an_adapter_before_it_is_loaded(core_class: type[Core]) -> None:
    loads, connector = AdapterLoads(), Connector()
    assert not loads.hears(), "nobody listens yet"
    loads.listen()
    assert loads.hears()
    connector.core = core = core_class(SimpleNamespace(_connectors=[object(), connector]))
    assert core.add_lora("one") and core.add_lora(lora_request="two")
    assert connector.met == [("one", 0), ("two", 1)] and core.done == ["one", "two"]
    assert core.collective_rpc("reload_weights") == "answer" and loads.hears()


@pytest.mark.parametrize("call", ["add_lora", "pin_LoRA", print])
def test_what_makes_workers_read_adapters_unheard_is_noted(core_class: type[Core], call: Any) -> None:
    loads = AdapterLoads()
    loads.listen()
    assert core_class(Connector()).collective_rpc(call) == "answer"
    assert not loads.hears()


def test_who_is_not_called_does_not_hear(core_class: type[Core], monkeypatch: pytest.MonkeyPatch) -> None:
    loads = AdapterLoads()
    loads.listen()
    real = core_class.add_lora
    monkeypatch.setattr(core_class, "add_lora", lambda self, *more: real(self, *more))
    assert loads.hears(), "another plug-in calls on"
    monkeypatch.setattr(core_class, "add_lora", lambda self, *more: True)
    assert not loads.hears()


def test_a_core_of_another_kind_loads_its_adapter_all_the_same(
    core_class: type[Core], caplog: pytest.LogCaptureFixture
) -> None:
    loads = AdapterLoads()
    loads.listen()
    core = core_class(Connector())
    del core.scheduler
    assert core.add_lora("one") and core.done == ["one"]
    assert not loads.hears() and "not cached from now on" in caplog.text


def test_before_a_core_is_loaded_nobody_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, CORE, raising=False)
    loads = AdapterLoads()
    loads.listen()
    assert not loads.hears()

"""Settings are checked once, by name; and the server clock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvdock.api.clock import ServerClock, boottime_ns
from kvdock.api.errors import SettingsError
from kvdock.api.http.guard import allowed_hosts, host_name
from kvdock.api.pool.capacity import Capacity
from kvdock.api.settings import OTLP_VARIABLE, Settings, effective
from kvdock.api.sizes import Whole, parse_bytes, parse_size, shared_memory
from kvdock.protocol.access import default_socket_path


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 1 << 20), ("4GiB", 4 << 30), ("1.5 GiB", 3 << 29), ("512mib", 512 << 20), ("2GB", 2 * 10**9),
     ("64M", 64 << 20), ("3g", 3 << 30)],
)
def test_sizes_are_read_with_their_unit(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "4 gigs", "1e9", "4GiB4", "9" * 5000, "9" * 400 + ".5GiB", "٤G"])
def test_what_is_no_size_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(SettingsError, match="size like 512MiB"):
        parse_bytes(text)


def test_an_unknown_setting_is_refused_by_name_with_the_nearest_known() -> None:
    with pytest.raises(SettingsError, match=r"pool_byts \(meant pool_bytes\?\)"):
        Settings.load({"pool_byts": "4GiB", "port": 1})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"port": 70000}, "port=70000"),
        ({"port": "many"}, "port='many'"),
        *[({"port": number}, f"wanted a whole number without fraction and exponent, as 1000; found port={number!r}")
          for number in ("1e3", "1000.0", "+5", " 5", "0x10", "1_000", 1000.0)],
        ({"tenant_bytes": 1e9}, "wanted a whole number without fraction and exponent, as 1000; found tenant_bytes="),
        ({"pool_bytes": 5}, "wanted a size >= 1MiB; found pool_bytes=5"),
        ({"heartbeat_s": 0}, "heartbeat_s=0"),
        ({"tier_urls": "shelf"}, "wanted name=url, separated by spaces; found 'shelf'"),
        ({"tier_urls": "shelf=a://b,Other=c://d other=e://f Third=g://h"}, "separated by spaces; found 'Third=g://h'"),
        ({"tier_urls": "shelf=a://b shelf=c://d"}, "wanted each name once, found 'shelf' twice"),
        ({"tier_urls": "redis=redis://host"}, "wanted other tiers, found 'redis': set redis_url"),
        ({"tier_urls": "disk=file:///a"}, "wanted other tiers, found 'disk': set disk_path"),
        ({"segment_bytes": "2GiB"}, "segment_bytes="),
        ({"pool_bytes": "1GiB", "segment_bytes": "1025MiB"}, "segment_bytes="),
        ({"pool_bytes": "16MiB", "segment_bytes": "32MiB"}, "segment_bytes=32MiB"),
        ({"low_water": 0.5, "high_water": 0.1}, "high_water=0.1"),
        ({"pool_bytes": "4GiB", "segment_bytes": "1MiB"}, "pool_bytes=4GiB wanted at most 4095MiB, as"),
        ({"pool_bytes": "4TiB"}, "as segment_bytes=1GiB and a pool has at most 4096 segments"),
        ({"growth": "later"}, "growth='later'"),
        ({"missed_heartbeats": 0}, "missed_heartbeats=0"),
        ({"missed_heartbeats": 1_000_001}, "missed_heartbeats=1000001"),
        *[({name: number}, f"{name}={number!r}")
          for name in ("heartbeat_s", "settle_s", "ask_s", "weights_grace_s", "watch_s", "drain_s", "tier_drain_s",
                       "history_interval_s", "session_cap", "low_water")
          for number in ("inf", "nan", float("inf"), float("nan"), 1e300)],
        ({"tenant_bytes": "9" * 400 + ".5%"}, "tenant_bytes="),
        ({"socket_path": "/" + "x" * 120}, "socket_path="),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_and_value(values: dict[str, object], named: str) -> None:
    with pytest.raises(SettingsError) as error:
        Settings.load(values)
    assert named in str(error.value)


@pytest.mark.security
@pytest.mark.parametrize(("text", "said"), [
    ("port = " + "[" * 10_000, "nested too deeply"), ("port = " + "{a = " * 10_000, "nested too deeply"),
    ("port = " + "9" * 5000, "4300 digits"), ("heartbeat_s = inf", "heartbeat_s"), ("settle_s = nan", "settle_s"),
    ("#" * (1 << 20) + "\nport = 0", "more than 1048576 characters"), ("port = 0\0", "no TOML"), ("\udcff", "utf-8"),
], ids=lambda value: value[:20])
def test_a_settings_file_with_anything_in_it_is_read_or_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "kvdock.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SettingsError, match=r"kvdock\.toml") as refused:
        effective({"KVDOCK_CONFIG": str(file)})
    assert said in str(refused.value)


@pytest.mark.security
@pytest.mark.parametrize("path", ["/dev/zero", "/", "/dev/full"])
def test_a_settings_file_that_never_ends_is_refused(path: str) -> None:
    with pytest.raises(SettingsError, match=f"settings file {path}"):
        effective({"KVDOCK_CONFIG": path})


@pytest.mark.security
@pytest.mark.parametrize("values", [
    {name: number} for name in ("heartbeat_s", "ask_s", "watch_s", "history_interval_s") for number in ("1e-320", 1e-9)
] + [
    {name: 10**19} for name in ("history_values", "recent_requests", "disk_bytes", "disk_day_bytes", "tier_queue_bytes")
] + [{"body_limit_bytes": "1TiB"}], ids=str)
def test_a_number_with_which_no_server_could_work_is_refused(values: dict[str, object]) -> None:
    """A time of nearly nothing has an infinite rate, and no list is as long as that."""
    (name,) = values
    with pytest.raises(SettingsError, match=f"{name}="):
        Settings.load({"disk_path": "/d", "disk_bytes": "1GiB", **values})


SECRET = "hunter2-hunter2"


@pytest.mark.security
@pytest.mark.parametrize("values", [
    {"observe": "traces", "traces_endpoint": f"http://host:4318/{rest}"}
    for rest in (f"?api_key={SECRET}", f"#{SECRET}", f";key={SECRET}", f"{SECRET}@")
] + [
    {"redis_url": f"redis://me:{SECRET}@host"}, {"objects_url": f"s3://key:{SECRET}@bucket"},
    {"observe": "traces", "traces_endpoint": f"grpc://me:{SECRET}@host:4317"},
    {"observe": "traces", "traces_endpoint": f"http://me:{SECRET} @host:4317"},
    {"tier_urls": f"cellar=cellar://me:{SECRET}@host"}, {"tier_urls": f"a=a://h b=b://:{SECRET}@h"},
], ids=lambda values: str(values).replace(SECRET, "SECRET"))
def test_no_secret_is_taken_in_the_url_of_any_setting(values: dict[str, object]) -> None:
    with pytest.raises(SettingsError) as refused:
        Settings.load(values)
    assert SECRET not in str(refused.value) and "password" in str(refused.value)


@pytest.mark.security
@pytest.mark.parametrize("values", [
    {"redis_url": f"redis://:{SECRET}@[::1:6379"}, {"tier_urls": f"redis://:{SECRET}@host"},
    {"observe": "kv_events", "kv_events_endpoint": f"tcp://me:{SECRET}@host:1"},
], ids=["no URL", "no name", "no address"])
def test_an_address_that_cannot_be_read_is_refused_without_its_password(values: dict[str, object]) -> None:
    with pytest.raises(SettingsError) as refused:
        Settings.load(values)
    assert SECRET not in str(refused.value) and "wanted" in str(refused.value)


@pytest.mark.security
@pytest.mark.parametrize("endpoint", ["http://[::1", "http://[x]:1", f"http://me:{SECRET}@host:4318"])
def test_an_address_that_the_environment_has_for_others_stops_nobody(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OTLP_VARIABLE, endpoint)
    assert Settings.load({}).traces_endpoint == ""
    with pytest.raises(SettingsError, match="traces_endpoint wanted an address"):
        Settings.load({"observe": "traces"})


def test_settings_come_from_the_environment_and_arguments_win() -> None:
    environ = {"KVDOCK_POOL_BYTES": "64MiB", "KVDOCK_PORT": "9000", "HOME": "/home/x"}
    settings = effective(environ, flags={"port": 9001, "host": None}).settings
    assert (settings.pool_bytes, settings.port, settings.host) == (64 << 20, 9001, "127.0.0.1")


def test_an_unknown_name_in_the_environment_is_refused() -> None:
    with pytest.raises(SettingsError, match="pool_size"):
        effective({"KVDOCK_POOL_SIZE": "1GiB"})


def test_a_small_pool_has_one_small_segment_unless_told() -> None:
    assert Settings.load({"pool_bytes": "16MiB"}).segment_bytes == 16 << 20


def test_the_socket_lies_in_the_users_run_directory_or_in_tmp(tmp_path: Path) -> None:
    assert default_socket_path({"XDG_RUNTIME_DIR": str(tmp_path)}) == f"{tmp_path}/kvdock.sock"
    (tmp_path / str(os.getuid())).mkdir()
    for environ in ({"XDG_RUNTIME_DIR": "/does/not/exist"}, {}):
        assert default_socket_path(environ, tmp_path) == f"{tmp_path}/{os.getuid()}/kvdock.sock"
        assert default_socket_path(environ, tmp_path / "none") == f"/tmp/kvdock-{os.getuid()}/kvdock.sock"


@pytest.mark.security
def test_a_loopback_server_answers_for_loopback_names_only() -> None:
    assert allowed_hosts(Settings.load({})) == frozenset({"localhost", "127.0.0.1", "::1"})
    everywhere = {"host": "0.0.0.0", "access_file": "/etc/kvdock/access.toml"}
    with pytest.raises(SettingsError, match=r"host='0\.0\.0\.0' wanted allowed_hosts as well"):
        Settings.load(everywhere)
    assert allowed_hosts(Settings.load({**everywhere, "allowed_hosts": "*"})) is None
    names = frozenset({"node7", "cache"})
    assert allowed_hosts(Settings.load({**everywhere, "allowed_hosts": "node7, cache"})) == names
    assert allowed_hosts(Settings.load({"allowed_hosts": "*"})) is None
    assert [host_name(h) for h in ("[::1]:80", "LOCALHOST:7410", "node7")] == ["::1", "localhost", "node7"]


def test_the_clock_counts_steps_and_cuts_each_to_one_second() -> None:
    reads = iter([10_000_000_000, 10_250_000_000, 10_250_000_000, 99_000_000_000, 98_000_000_000, 99_500_000_000])
    clock = ServerClock(lambda: next(reads))
    assert [clock.now_ms() for _ in range(5)] == [250, 250, 1250, 1250, 2250]


def test_the_clocks_own_source_goes_forward() -> None:
    assert 0 < boottime_ns() <= boottime_ns()


def test_variables_of_clients_are_none_of_the_servers_settings() -> None:
    environ = {"KVDOCK_ADDRESS": "unix:/s", "KVDOCK_VLLM_CHUNK_TOKENS": "64", "HOME": "/home/x"}
    assert effective(environ).settings == effective({"HOME": "/home/x"}).settings


@pytest.mark.parametrize(("text", "mib"), [("50%", 500), ("0.25 %", 2), ("auto", 800), ("7M", 7)])
def test_a_share_is_one_of_the_whole_in_whole_mib(text: str, mib: int) -> None:
    assert parse_size(text, lambda: Whole("it", 1000 << 20), 0.8) == mib << 20


@pytest.mark.parametrize(("text", "said"), [
    ("0%", "above 0% and up to 100%"), ("101%", "above 0% and up to 100%"),
    ("0.01%", "of it, which is 1000MiB, is less"), ("half", "size like 512MiB"), ("%", "size like 512MiB"),
])
def test_a_share_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse_size(text, lambda: Whole("it", 1000 << 20), 0.8)


def test_shares_are_of_shared_memory_of_the_file_system_and_of_the_pool(tmp_path: Path) -> None:
    memory = shared_memory().bytes
    settings = Settings.load({"pool_bytes": "10%", "tenant_bytes": "50%", "tier_queue_bytes": "25%"})
    assert settings.pool_bytes == memory // 10 >> 20 << 20 and memory <= os.statvfs("/dev/shm").f_blocks * 4096
    assert settings.tenant_bytes == settings.pool_bytes // 2 >> 20 << 20
    assert settings.tier_queue_bytes == settings.pool_bytes // 4 >> 20 << 20
    assert Settings.load({"pool_bytes": "auto"}).pool_bytes == int(memory * 0.8) >> 20 << 20
    there = os.statvfs(tmp_path)
    settings = Settings.load({"disk_path": f"{tmp_path}/made/later", "disk_bytes": "auto"})
    assert settings.disk_bytes == there.f_blocks * there.f_frsize // 2 >> 20 << 20


@pytest.mark.parametrize("name", ["segment_bytes", "body_limit_bytes", "disk_bytes"])
@pytest.mark.parametrize("text", ["50%", "auto"])
def test_a_share_of_nothing_is_refused_by_the_setting(name: str, text: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}='{text}': .*there is nothing that it is a share of"):
        Settings.load({name: text})


def test_a_control_group_with_less_than_shared_memory_is_the_whole(tmp_path: Path) -> None:
    (tmp_path / "group").write_text("0::/a\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/memory.max").write_text(f"{64 << 20}\n")
    found = shared_memory(Capacity(Path("/dev/shm"), tmp_path / "group", tmp_path))
    assert found == (f"the memory limit of the control group {tmp_path}/a", 64 << 20)

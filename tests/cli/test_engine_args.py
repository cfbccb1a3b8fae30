"""`kvdock vllm-args` and `kvdock sglang-args`: words that the shell leaves whole, and what is refused.

What the engines' own parsers make of them is in tests/vllm/test_args.py and tests/sglang/test_args.py."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess
from cli_helpers import KVDOCK, clean_environ, kvdock, refusal

from kvdock.cli.client import remedy
from kvdock.protocol.errors import ServerUnavailable

VLLM = ["--shutdown-timeout", "10", "--kv-transfer-config"]


def words(*arguments: str, **environ: str) -> list[str]:
    """The words that the shell makes of what a command prints, in a folder with a file for every pattern."""
    done = subprocess.run(
        ["sh", "-c", f'printf "%s\\n" $({" ".join(KVDOCK)} "$@")', "sh", *arguments], env=clean_environ(**environ),
        capture_output=True, text=True, timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def extra_of(found: list[str]) -> Any:
    return json.loads(found[-1])["kv_connector_extra_config"]


def test_a_server_where_engines_look_for_it_is_not_named() -> None:
    *flags, last = words("vllm-args", XDG_RUNTIME_DIR="")
    assert flags == VLLM and last == '{"kv_connector":"KvdockConnector","kv_role":"kv_both"}'


def test_another_server_is_named_and_no_word_is_split(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/it's a \"b\" [c]*? ~\\x/kvdock.sock"
    found = words("vllm-args", "--server", address, "weights_digest=a b", "load_async=false", "lookup_wait_s=1")
    assert found[:-1] == VLLM
    assert extra_of(found) == {
        "address": address, "weights_digest": "a b", "load_async": False, "lookup_wait_s": 1,
    }
    assert extra_of(words("vllm-args", KVDOCK_ADDRESS=address)) == {"address": address}
    config = json.loads(words("sglang-args", "--server", address)[-1])
    assert config["linker_extra_config"] == {"address": address} and config["linker"] == "KvdockLinker"


def test_as_json_they_are_a_list() -> None:
    assert json.loads(kvdock("vllm-args", "--json").stdout) == {"arguments": words("vllm-args")}


@pytest.mark.parametrize(("arguments", "said"), [
    (("vllm-args", "chunk_token=2"), "'chunk_token' is no setting of kvdock, which has"),
    (("vllm-args", "chunk_tokens=many"), "chunk_tokens is 'many', and int is wanted"),
    (("vllm-args", "lookup_wait_s=2"), "lookup_wait_s is 2.0, and 0.0 to 1.0 is wanted"),
    (("vllm-args", "load_async"), "found 'load_async', wanted NAME=VALUE"),
    (("vllm-args", "on_reset=never"), "on_reset is 'never', and one of clear, apart, leave is wanted"),
    (("sglang-args", "chunk_tokens=64"), "'chunk_tokens' is no setting of kvdock"),
    (("sglang-args", "--page-size", "32"), "--page-size: found 32, wanted 64, 128 or 256"),
    (("vllm-args", "--server", "somewhere"), "'somewhere'"),
])
def test_what_the_connector_would_refuse_is_refused(arguments: tuple[str, ...], said: str) -> None:
    assert said in refusal(kvdock(*arguments), 2)


def test_it_says_whether_the_server_answers(server: ServerProcess, tmp_path: Path) -> None:
    assert kvdock("vllm-args", "--server", server.unix).stderr == ""
    lost = kvdock("sglang-args", "--server", f"unix:{tmp_path}/kvdock.sock")
    assert lost.returncode == 0 and len(lost.stderr.splitlines()) == 1
    assert "until it reaches a server, SGLang computes all prompts itself" in lost.stderr
    assert "start one with `kvdock serve`" in lost.stderr


@pytest.mark.parametrize(("cause", "said"), [
    (FileNotFoundError(), "start one with `kvdock serve`"), (PermissionError(), "another user's"),
    (TimeoutError(), "`kvdock doctor`"),
])
def test_what_to_do_depends_on_why_no_server_answers(
    cause: OSError, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    lost = ServerUnavailable("unix:/x.sock: …")
    lost.__cause__ = cause
    assert said in remedy(lost)

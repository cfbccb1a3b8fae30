"""The recipe of vLLM's image with kvdock in it, checked without a container engine."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise

import pytest
from paths import ROOT

from kvdock import _core
from kvdock.connectors.vllm.setup import VERSIONS, Settings

RECIPE, SERVER = ROOT / "examples" / "vllm.Dockerfile", ROOT / "Dockerfile"
KNOWN = {"ARG", "COPY", "ENV", "FROM", "RUN", "WORKDIR"}
"""An ENTRYPOINT, a CMD or a USER would not be vLLM's."""


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", RECIPE.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line]
    return [(name, rest) for name, rest in lines]


def commands() -> list[list[str]]:
    """The words of each command of all RUN lines, without RUN's own options."""
    return [
        shlex.split(command) for name, rest in instructions() if name == "RUN"
        for command in re.sub(r"^(--\S+ +)+", "", rest).split("&&")
    ]


def after(words: list[str], option: str) -> list[str]:
    return [value for word, value in pairwise(words) if word == option]


def test_its_instructions_are_known_and_leave_vllms_entry() -> None:
    assert {name for name, _ in instructions()} <= KNOWN
    stages = [rest for name, rest in instructions() if name == "FROM"]
    image = "vllm/vllm-openai:${VLLM}@${DIGEST}"
    assert stages == [f"{image} AS build", image], "one Python, one CUDA"


def test_its_vllm_is_the_newest_that_was_tried() -> None:
    chosen, digest = (rest for name, rest in instructions() if name == "ARG")
    assert digest == "DIGEST", "without a default"
    assert re.fullmatch(r"VLLM=v{}\.{}\.\d+".format(*VERSIONS[1]), chosen), chosen
    assert re.findall(r"--build-arg VLLM=v(\d+)\.(\d+)", RECIPE.read_text()) == [("0", "32")]


def test_what_it_copies_and_installs_from_is_in_the_build_context() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [rest.split()[:-1] for name, rest in instructions() if name == "COPY"]
    assert copied == [["pins"], ["."]] and "pins" in sent
    lists = [path for words in commands() for path in after(words, "-r")]
    assert set(lists) == {"pins/build.txt", "pins/server.txt"} and all((ROOT / path).is_file() for path in lists)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    files = {"kvdock", "docs", "csrc", "CMakeLists.txt", "README.md", "pyproject.toml"}
    installed = (ROOT / "CMakeLists.txt").read_text().split("install(")[1:]
    files |= {word for one in installed for word in re.findall(r"^(?:FILES|DIRECTORY) \"?([a-z]+)/", one)}
    assert files | set(project["project"]["license-files"]) <= sent


@pytest.mark.security
def test_it_takes_from_an_index_only_what_has_a_hash() -> None:
    pips = [words for words in commands() if "pip" in " ".join(words[:3])]
    assert len(pips) == 4
    for words in pips:
        assert ("--require-hashes" in words) == bool(after(words, "-r"))
        assert "--require-hashes" in words or "--no-index" in words or words[1] == "wheel", words
    assert ("ENV", "PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all: PIP_DISABLE_PIP_VERSION_CHECK=1") in instructions()


def test_it_installs_what_the_connector_needs_of_what_it_downloaded() -> None:
    words, = (words for words in commands() if "--no-index" in words)
    assert not {"-U", "--upgrade", "--force-reinstall", "-I"} & set(words), "nothing that vLLM has is replaced"
    wanted = words[words.index("--no-deps") + 1 :]
    pinned = (ROOT / "pins/server.txt").read_text()
    assert wanted[0] == "kvdock-engine" and all(f"\n{name}==" in pinned for name in wanted[1:])


def test_a_build_without_kernels_is_no_image() -> None:
    words, = (words for words in commands() if words[1:2] == ["-c"])
    done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
    assert (done.returncode == 0) == bool(_core.cuda_kernels()), done.stderr
    without = words[2].replace("_core.cuda_kernels()", "[]")
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)
    assert done.returncode == 1 and "for want of nvcc" in done.stderr


@pytest.mark.security
def test_it_trusts_the_user_of_the_servers_image_at_its_socket() -> None:
    server = SERVER.read_text().split("\nFROM ")[-1]
    user, = re.findall(r"^USER (\d+)$", server, re.MULTILINE)
    socket, = re.findall(r"KVDOCK_SOCKET_PATH=(\S+)", server)
    environ = dict(word.split("=", 1) for word in instructions()[-1][1].split())
    settings = Settings.load({}, environ)
    assert (settings.address, settings.trusted_uid) == (f"unix:{socket}", int(user))


def test_every_command_is_one_for_a_shell() -> None:
    for name, rest in instructions():
        if name == "RUN":
            command = re.sub(r"^(--\S+ +)+", "", rest)
            assert subprocess.run(["sh", "-n", "-c", command]).returncode == 0, command

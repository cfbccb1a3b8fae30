"""Reinforcement learning with two rollout engines that share one kvdock server.

    export KVDOCK_WEIGHTS_KEPT=0 VLLM_SERVER_DEV_MODE=1
    CLIENT="python examples/reinforce.py" MODEL=folder sh examples/two_instances.sh
    CLIENT="python examples/reinforce.py" MODEL=folder ENGINE=sglang sh examples/two_instances.sh

In each step both engines sample completions of the same prompts, which begin alike; REINFORCE makes a gradient step
from their rewards on the CPU; and both engines load the new weights by their own calls, under a name that no other
weights have. docs/operate/rl.md explains it. It needs torch, transformers and kvdock.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import torch
import transformers

from kvdock.client.client import Client
from kvdock.protocol.hits import HitTotals

# ---------------------------------------------------------------------- rollout engines


def post(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON of the answer, if it is JSON. Raises HTTPError where the engine refuses."""
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(f"{url}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        text = answer.read()
        return json.loads(text) if "json" in answer.headers.get("content-type", "") else text


class Vllm:
    """A `vllm serve` with VLLM_SERVER_DEV_MODE=1."""

    requests_more = 0
    """Requests that it makes of one for several completions, beside one for each."""

    def __init__(self, url: str) -> None:
        self.url = url

    def sample(self, prompt: list[int], n: int, tokens: int, temperature: float = 1.0) -> list[list[int]]:
        answer = post(self.url, "/v1/completions", {
            "model": "model", "prompt": prompt, "n": n, "max_tokens": tokens, "temperature": temperature,
            "ignore_eos": True, "return_token_ids": True,
        })
        return [choice["token_ids"] for choice in answer["choices"]]

    def load(self, folder: Path, version: str) -> None:
        post(self.url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        post(self.url, "/reset_prefix_cache")
        post(self.url, "/update_weight_version", {"new_version": version})


class Sglang:
    """A `sglang serve`."""

    requests_more = 1
    """It computes the prompt first."""

    def __init__(self, url: str) -> None:
        self.url = url

    def sample(self, prompt: list[int], n: int, tokens: int, temperature: float = 1.0) -> list[list[int]]:
        answer = post(self.url, "/generate", {"input_ids": prompt, "sampling_params": {
            "n": n, "max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True,
        }})
        return [one["output_ids"] for one in (answer if n > 1 else [answer])]

    def load(self, folder: Path, version: str) -> None:
        post(self.url, "/update_weights_from_disk", {
            "model_path": str(folder), "weight_version": version, "flush_cache": True,
        })


# ---------------------------------------------------------------------- training


def reward(completion: list[int], vocabulary: int) -> float:
    """The share of tokens in the first half of the vocabulary: a task that every model learns."""
    return sum(token < vocabulary // 2 for token in completion) / len(completion)


def learn(model: Any, optimizer: torch.optim.Optimizer, groups: list[tuple[list[int], list[list[int]]]]) -> float:
    """One step of REINFORCE, with the mean of a prompt's rewards as the baseline. `groups`: each prompt with its
    completions of equal length. Returns the mean reward."""
    optimizer.zero_grad()
    rewards = []
    for prompt, completions in groups:
        earned = torch.tensor([reward(one, model.config.vocab_size) for one in completions])
        whole = torch.tensor([prompt + one for one in completions])
        logits = model(whole).logits[:, len(prompt) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(-1, whole[:, len(prompt) :, None])[..., 0]
        (-((earned - earned.mean())[:, None] * chosen).mean() / len(groups)).backward()
        rewards.append(earned.mean().item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return sum(rewards) / len(rewards)


# ---------------------------------------------------------------------- what kvdock says


REPORT_S = 120.0
"""How long an engine may take to report the requests that it has answered."""


class Watch:
    """What the engines have asked kvdock for, and what the pool holds."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before: dict[str, HitTotals] = {}
        self._asked = 0

    def since(self, requests: int) -> list[dict[str, int]]:
        """Per engine, where its prompts' tokens came from since the last call, once all `requests` of each that it has
        answered since then are reported. An engine reports them within seconds. Raises TimeoutError."""
        self._asked += requests
        found, end_s = self._hits(), time.monotonic() + REPORT_S
        while min((hits.requests for hits in found.values()), default=0) < self._asked:
            if time.monotonic() > end_s:
                reported = {session: hits.requests for session, hits in found.items()}
                raise TimeoutError(
                    f"requests reported after {REPORT_S:.0f} s: found {reported}, wanted {self._asked} of each engine"
                )
            time.sleep(0.1)  # between two questions to the server
            found = self._hits()
        steps = []
        for session, now in sorted(found.items()):
            before = self._before.get(session, HitTotals())
            steps.append({
                "computed": now.computed_tokens - before.computed_tokens,
                "loaded": now.loaded_tokens - before.loaded_tokens,
                "own_cache": now.local_tokens - before.local_tokens,
            })
        self._before = found
        return steps

    def _hits(self) -> dict[str, HitTotals]:
        return {one.session: one.totals.hits for one in self._client.sessions().sessions}

    def has_only(self, version: str, patience_s: float = 30.0) -> bool:
        """Whether the pool soon has chunks of no other weights than these: the server looks twice a second."""
        end_s = time.monotonic() + patience_s
        while self._weights() != {version} and time.monotonic() < end_s:
            time.sleep(0.1)  # between two questions to the server
        return self._weights() == {version}

    def pool_bytes(self) -> int:
        return self._client.status().pool.ready_bytes

    def _weights(self) -> set[str | None]:
        return {one.weights for one in self._client.namespaces().namespaces}


# ---------------------------------------------------------------------- the steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16, help="completions of each prompt on each engine")
    parser.add_argument("--tokens", type=int, default=16, help="the length of a completion")
    parser.add_argument("--rate", type=float, default=1e-3, help="how far a gradient step goes")
    parser.add_argument("--folder", type=Path, help="keeps the weights of each step; by default none are kept")
    parser.add_argument("--json", action="store_true", help="a JSON object for each step, with tokens")
    asked = parser.parse_args()
    torch.manual_seed(0)
    draw = random.Random(0)
    engine: type[Vllm | Sglang] = Vllm if os.environ["ENGINE"] == "vllm" else Sglang
    engines = [engine(f"http://127.0.0.1:{os.environ[name]}") for name in ("FIRST", "SECOND")]
    model = transformers.AutoModelForCausalLM.from_pretrained(os.environ["MODEL"], dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=asked.rate)
    shared = [draw.randrange(5, model.config.vocab_size) for _ in range(512)]
    prompts = [shared + [draw.randrange(5, model.config.vocab_size) for _ in range(137)] for _ in range(3)]
    run = uuid.uuid4().hex[:8]  # two runs on one server: their steps have other weights, and need other names
    folder = asked.folder or Path(tempfile.mkdtemp())
    watch = Watch(Client(f"unix:{os.environ['KVDOCK_SOCKET_PATH']}"))
    for step in range(asked.steps):
        said: dict[str, Any] = {"step": step, "prompts": prompts, "greedy": []}
        groups = [(prompt, list[list[int]]()) for prompt in prompts]
        for one in engines:
            for prompt, completions in groups:
                completions += one.sample(prompt, asked.samples, asked.tokens)
        for one in engines:
            said["greedy"].append([one.sample(prompt, 1, asked.tokens, temperature=0.0)[0] for prompt in prompts])
        said["prompt_tokens"] = watch.since(len(prompts) * (asked.samples + engine.requests_more + 1))
        said["reward"] = learn(model, optimizer, groups)
        said["stored_bytes"] = watch.pool_bytes()
        model.save_pretrained(folder / f"step-{step + 1}")
        for one in engines:
            one.load(folder / f"step-{step + 1}", f"{run}-{step + 1}")
        said["only_new"], said["left_bytes"] = watch.has_only(f"version {run}-{step + 1}"), watch.pool_bytes()
        if asked.folder is None:
            shutil.rmtree(folder / f"step-{step + 1}")
        show(said, as_json=asked.json)


def show(said: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(said), flush=True)
        return
    print(f"step {said['step']}: reward {said['reward']:.3f}")
    for number, tokens in enumerate(said["prompt_tokens"], 1):
        print(
            f"  engine {number}: {tokens['computed']:,} prompt tokens computed, {tokens['loaded']:,} loaded from "
            f"kvdock, {tokens['own_cache']:,} in its own cache"
        )
    whose = "no old weights" if said["only_new"] else "OLD WEIGHTS, TOO"
    stored, left = said["stored_bytes"], said["left_bytes"]
    print(f"  the pool had {stored:,} bytes, and after the update {left:,}: {whose}", flush=True)


if __name__ == "__main__":
    main()

"""SGLang in a process of its own, for bench.sglang: reads jobs as JSON lines and writes answers.

    python -m bench.sglang.engine '{"kind": "kvdock", …}'

`count` engines run, and each one's scheduler is a process of its own, as in service; most jobs use the first engine.
`model` is a folder or a configuration; a configuration gets SGLang's dummy weights. A time to first token runs from the
request to the first token that this process gets.

A job that fails is answered with {"error": …} and ends the process, because the state of its engine is unknown.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from bench.engine_child import pace
from bench.sglang.conversations import Answered, Conversations, Workload

Prompt = list[int]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
}


class Engine:
    def __init__(self, said: dict[str, Any]) -> None:
        began = time.perf_counter()
        import sglang

        imported = time.perf_counter()
        options, model = said["engine"], said["model"]
        if not isinstance(model, str):
            self._folder = tempfile.TemporaryDirectory()
            Path(self._folder.name, "config.json").write_text(json.dumps(model))
            options, model = options | {"load_format": "dummy"}, self._folder.name
        self.engines = [sglang.Engine(model_path=model, **options) for _ in range(said["count"])]
        self.facts = {
            "kind": said["kind"], "sglang": sglang.__version__, "import_s": imported - began,
            "build_s": time.perf_counter() - imported,
        }

    async def _answers(self, ids: Prompt, tokens: int, at: int = 0, **more: Any) -> AsyncIterator[dict[str, Any]]:
        """The answers of engine `at` to a request, token by token: what SGLang says about each, and the tokens."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        asked = GenerateReqInput(
            input_ids=ids, stream=True, sampling_params={
                "temperature": 0, "max_new_tokens": tokens, "ignore_eos": True,
            }, **more,
        )
        async for answer in self.engines[at].tokenizer_manager.generate_request(asked, None):
            yield answer["meta_info"] | {"tokens": answer["output_ids"]}

    # ------------------------------------------------------------------ jobs

    async def first_token(self, ids: Prompt, tokens: int = 1) -> dict[str, Any]:
        began, first_s, last = time.perf_counter(), 0.0, dict[str, Any]()
        async for about in self._answers(ids, tokens):
            first_s, last = first_s or time.perf_counter() - began, about
        return {"ttft_s": first_s, "cached": last["cached_tokens"], "from": last.get("cached_tokens_details")}

    async def run(self, ids: Prompt, tokens: int) -> dict[str, Any]:
        """The answer of the job `run`: tokens and their log-probabilities, bit for bit."""
        said = [about async for about in self._answers(
            ids, tokens, return_logprob=True, logprob_start_len=len(ids) - 1
        )]
        run = [[token, float(p).hex()] for p, token, _ in said[-1]["output_token_logprobs"]]
        return {"run": run, "cached": said[-1]["cached_tokens"]}

    async def decode(
        self, prompts: list[Prompt], tokens: int, feed: list[Prompt] | None = None, interval_s: float = 0.0,
        is_new: bool = False, most_fed: int = 0,
    ) -> dict[str, Any]:
        """All of `prompts` decode together; meanwhile requests for one token arrive, made from `feed` in turns.
        `is_new`: no prompt of `feed` is used twice; `most_fed`: how many of them may be under way. Figures cover the
        time in which all of `prompts` ran."""
        times: list[list[float]] = [[] for _ in prompts]
        waits_ms: list[float] = []
        cached: list[int] = []
        all_run, ended = asyncio.Event(), asyncio.Event()

        async def decoder(at: int) -> None:
            seen = 0
            async for about in self._answers(prompts[at], tokens):
                now, count = time.perf_counter(), about["completion_tokens"]
                times[at] += [now] * (count - seen)
                seen = count
                if all(times):
                    all_run.set()
            ended.set()

        async def fed(ids: Prompt) -> None:
            seen = await self.first_token(ids)
            waits_ms.append(seen["ttft_s"] * 1e3)
            cached.append(seen["cached"])

        async def feeder() -> int:
            await all_run.wait()
            turn, under_way = 0, set[asyncio.Task[None]]()
            while feed and not ended.is_set():
                await asyncio.sleep(interval_s)
                if len(under_way) < most_fed:
                    ids = feed[turn % len(feed)]
                    shift = turn // len(feed) if is_new else 0
                    task = asyncio.create_task(fed(ids[shift:] + ids[:shift]))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
                    turn += 1
            await asyncio.gather(*under_way)
            return turn

        feeding = asyncio.create_task(feeder())
        await asyncio.gather(*(decoder(at) for at in range(len(prompts))))
        turns = await feeding
        start, end = max(seen[0] for seen in times), min(seen[-1] for seen in times)
        return {**pace(times, start, end), "fed": turns, "fed_cached": dict(Counter(cached)),
                "fed_ttft_ms": statistics.median(waits_ms) if waits_ms else None}

    async def converse(self, load: dict[str, Any]) -> dict[str, Any]:
        """See Conversations.run. `load`: the fields of a Workload."""
        async def ask(at: int, ids: Prompt, tokens: int) -> Answered:
            began, first_s, cached, said = time.perf_counter(), 0.0, 0, list[int]()
            async for about in self._answers(ids, tokens, at):
                first_s = first_s or time.perf_counter() - began
                cached = about["cached_tokens"]
                said = about["tokens"] if len(about["tokens"]) == about["completion_tokens"] else said + about["tokens"]
            return first_s, cached, said

        return await Conversations(Workload(**load)).run(ask)

    async def flush(self) -> dict[str, Any]:
        """Empties the prefix cache on the device, and HiCache's with it."""
        for engine in self.engines:
            await engine.tokenizer_manager.flush_cache()
        return {}

    def do(self, job: dict[str, Any]) -> dict[str, Any]:
        what: Callable[..., Any] = getattr(self, job.pop("do"))
        limit_s = job.pop("limit_s")
        answer: dict[str, Any] = self.engines[0].loop.run_until_complete(asyncio.wait_for(what(**job), limit_s))
        return answer


def main() -> None:
    said = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print to stdout, which carries the answers
    os.environ.update(ENVIRONMENT)
    try:
        engine = Engine(said)
        print(json.dumps(engine.facts), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(engine.do(json.loads(line))), file=answers, flush=True)
        for one in engine.engines:
            one.shutdown()
    except Exception as error:  # every failure is reported and ends the process
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        if (utils := sys.modules.get("sglang.srt.utils")) is not None:
            utils.kill_process_tree(os.getpid(), include_parent=False)  # a scheduler waits for work on a whole core
        os._exit(1)  # processes that the engine has started would delay an ordinary exit


if __name__ == "__main__":
    main()

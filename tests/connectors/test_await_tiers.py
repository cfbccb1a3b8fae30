"""How waits for lower tiers end, as they are counted."""

from __future__ import annotations

import pytest

from kvdock.connectors.waits import AwaitTiers
from kvdock.protocol.schemas import PendingTokens

MOST_S, TOKENS = 5.0, 1024


class Waiting:
    """A request whose question was sent at 0 and whose answer, that all may come, was read at `read_s`."""

    def __init__(self, read_s: float) -> None:
        self.now_s, self.ends = read_s, list[str]()
        self.tiers = AwaitTiers(MOST_S, None, lambda: self.now_s, lambda how, seconds: self.ends.append(how))
        assert self.tiers.waits("r", PendingTokens(TOKENS, "disk", 1.0), 0, 0, 0.0)

    def hears(self, at_s: float, said: PendingTokens | None, hit_tokens: int) -> bool:
        self.now_s = at_s
        return self.tiers.waits("r", said, hit_tokens, 0, at_s)


@pytest.mark.parametrize(("at_s", "hit_tokens", "how"), [
    (1.0, TOKENS, "fulfilled"), (MOST_S + 0.2, TOKENS, "fulfilled"), (1.0, 512, "shortened"),
    (MOST_S - 0.01, 0, "shortened"), (MOST_S + 0.01, 0, "expired"), (MOST_S + 0.2, 512, "expired"),
])
def test_a_wait_that_the_server_ends_has_expired_once_its_time_is_over_there(
    at_s: float, hit_tokens: int, how: str
) -> None:
    waiting = Waiting(read_s=0.3)  # a step was long: here the time is over .3 s later
    assert not waiting.hears(at_s, None, hit_tokens)
    assert waiting.ends == [how]


def test_a_wait_that_nobody_ends_expires_when_its_time_is_over_here() -> None:
    waiting = Waiting(read_s=0.3)
    still = PendingTokens(TOKENS, "disk", 0.1)
    assert waiting.hears(MOST_S + 0.2, still, 512) and waiting.ends == []
    assert not waiting.hears(MOST_S + 0.4, still, 512) and waiting.ends == ["expired"]
    assert not waiting.hears(MOST_S + 0.5, still, 512) and waiting.ends == ["expired"], "it does not wait again"

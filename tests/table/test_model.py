"""The chunk table and a plain-Python model do the same, whatever is asked of them."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from table_against_model import TableAgainstModel

pytestmark = [pytest.mark.table_model, pytest.mark.security]

TestTableAgainstModel = TableAgainstModel.TestCase
# Shrinking takes minutes, more than a test's timeout, and the assertion that failed would never be shown: it is left
# out. For a shorter example: MODEL_SHRINK=1 make test ARGS='tests/table/test_model.py --timeout=0'.
SHRINK = [Phase.shrink] if os.environ.get("MODEL_SHRINK") else []
TestTableAgainstModel.settings = settings(
    max_examples=int(os.environ.get("MODEL_EXAMPLES", "100")), stateful_step_count=60, deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, *SHRINK], suppress_health_check=[HealthCheck.too_slow],
)


def test_of_leaves_that_were_used_at_once_any_may_go_first() -> None:
    """A deletion leaves two of one store: its first chunk, and its last, whose record was another's and has the lower
    number."""
    at = TableAgainstModel()
    long, other = (0, 0, 0, 0, 0, 0), (1, 0, 1)
    at.set_quota(1, 6, None)
    for path in (other, long):
        at.store(3, path, window=True, temporary=False)
    at.delete(2, long[:2])
    for count in (1, 2):
        at.store(3, other[:count], window=True, temporary=False)
        at.both_agree()
    at.teardown()

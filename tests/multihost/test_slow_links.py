"""Links that become slow, or far: what the router makes of them."""

from __future__ import annotations

import time
from random import Random

from tests.support.hosts import asked, random_prompt
from tests.support.processes import eventually


def test_prompts_stay_local_while_the_link_is_slow_and_no_longer(fleet):
    """As the plans in the answers say. Nobody uses the link meanwhile, so the worker looks at it by itself."""
    random, answers = Random(3), []

    def plan():
        answers.append(asked(fleet.router.address, random_prompt(random), explain=True))
        return answers[-1].messages[0].plan

    eventually(lambda: plan().prefill_workers, "a plan with a hand-off")
    fleet.a.limit("2mbit")
    limited_at, num_before = time.monotonic(), len(answers)
    eventually(lambda: not plan().prefill_workers, "a plan without")
    shifted_at, num_slow = time.monotonic(), len(answers) - num_before - 1
    local = answers[-1].messages[0].plan
    [remote] = local.prefill_candidates
    assert remote.exposed_transfer_s > local.prediction.prefill_s  # why
    fleet.a.lift_limit()
    lifted_at = time.monotonic()
    eventually(lambda: plan().prefill_workers, "a plan with a hand-off again")
    print(
        f"\nslow link: {num_slow} hand-offs over it, then local after {shifted_at - limited_at:.1f} s;"
        f" hand-offs again {time.monotonic() - lifted_at:.1f} s after it was fast again"
    )
    fleet.assert_right(answers)
    fleet.assert_idle()

"""The console's page in a real browser, before a real small fleet."""

from __future__ import annotations

import re
import uuid
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Page, expect

from headrace.cluster.redis_server import RedisServer
from headrace.directory.records import Role
from tests.support.console import browser_page, running_router
from tests.support.fleet import STEP_TOKENS, fleet_settings, workers
from tests.support.process_fleet import ProcessWorker

P, D = Role.PREFILL, Role.DECODE
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


@pytest.fixture(scope="module")
def redis_url():
    with RedisServer() as server:
        yield server.url


@pytest.fixture
def settings(tiny_model_files, redis_url):
    directory = {"url": redis_url, "cluster": uuid.uuid4().hex[:8], "worker_ttl_s": 2.0}
    return fleet_settings(tiny_model_files, redis_url, directory=directory, engine={"num_blocks": 1024})


@asynccontextmanager
async def console(settings, *roles, num_others=0):
    """The page, with a row for each worker."""
    num_workers = len(roles) + num_others
    async with (
        workers(settings, *roles),
        running_router(settings, num_workers) as router,
        browser_page() as page,
    ):
        await page.goto(f"{router.http_address}/console")
        await expect(page.locator("#link")).to_have_text("live")
        await expect(page.locator("tr[data-condition=serving]")).to_have_count(num_workers)
        yield page


async def ask(page: Page, prompt: str, *, regex: str = "", max_tokens: int = 12) -> None:
    await page.locator("#mode").select_option("completion")
    await page.locator("#prompt").fill(prompt)
    await page.locator("#regex").fill(regex)
    await page.locator("#max-tokens").fill(str(max_tokens))
    await page.locator("#send").click()
    await expect(page.locator("#ask-state")).to_have_text(re.compile("^(stop|length): "))


async def test_the_page_shows_the_fleet_and_where_an_answer_came_from(settings):
    async with console(settings, P, D) as page:
        prefill, decode = page.locator("[data-worker=prefill-0]"), page.locator("[data-worker=decode-1]")
        await expect(prefill).to_contain_text("/ 1,024")
        await expect(prefill.locator("[data-name=role]")).to_have_text("prefill")
        await expect(decode.locator("[data-name=role]")).to_have_text("decode")
        await ask(page, "x" * (5 * STEP_TOKENS))
        await expect(page.locator("#answer")).not_to_be_empty()
        await expect(page.locator("#path")).to_contain_text("prefill-0")
        await expect(page.locator("#path")).to_contain_text("decode-1")
        phases = page.locator("#waterfall .phase")
        await expect(phases.filter(has_text=re.compile("^prefill"))).to_contain_text("ms")
        assert await phases.evaluate_all("all => all.map(each => each.dataset.phase)") == [
            "admission and routing",
            "queue of the worker",
            "prefill",
            "first token on its way",
            "KV reads (sum)",
            "decode",
        ]
        prompt = await page.locator("#numbers [data-tile=prompt] .value").inner_text()
        assert prompt.split() == ["80", "tokens"]
        moved = await page.locator("#numbers [data-tile=moved] .value").inner_text()
        assert int(moved.split()[0]) == 5 * STEP_TOKENS // 4
        await expect(page.locator("#reason")).not_to_be_empty()
        await expect(page.locator("#prefill-candidates tr.chosen")).to_contain_text("prefill-0")
        await expect(page.locator("#decode-candidates tr.chosen")).to_contain_text("decode-1")
        # The live view has counted it, by the workers that did it.
        await expect(page.locator("#facts")).to_contain_text("ok 1")
        await expect(prefill.locator("[data-name='TTFT p50 / p95']")).to_contain_text("ms")
        await expect(decode.locator("[data-name='ITL p50 / p95']")).to_contain_text("ms")
        await expect(decode.locator("[data-name='KV read']")).to_contain_text("kB")


async def test_markup_in_prompt_and_answer_is_text(settings):
    literal = HOSTILE.replace(".", r"\.")
    async with console(settings, P, D) as page:
        await ask(page, f"{HOSTILE} {HOSTILE}", regex=literal, max_tokens=200)
        assert await page.locator("#answer").inner_text() == HOSTILE
        assert await page.locator("#answer *").count() == 0
        await page.locator("#regex").fill(f"({HOSTILE}")  # an error that quotes it
        await page.locator("#send").click()
        await expect(page.locator("#ask-error")).to_be_visible()
        assert await page.locator("#ask-error *").count() == 0
        assert await page.evaluate("window.hacked") is None


async def test_a_killed_worker_is_marked(settings, tmp_path):
    doomed = ProcessWorker(settings, "decode", "doomed", tmp_path)
    await doomed.start()
    try:
        async with console(settings, P, D, num_others=1) as page:
            row = page.locator("[data-worker=doomed]")
            await expect(row).to_have_attribute("data-condition", "serving")
            doomed.kill()
            await expect(row).to_have_attribute("data-condition", "gone")
            await expect(page.locator("[data-worker=decode-1]")).to_have_attribute(
                "data-condition", "serving"
            )
    finally:
        doomed.stop()


async def test_a_stopped_answer_is_cancelled_everywhere(settings):
    """`workers` fails if one of them is not idle in the end."""
    stop_at_once = """new MutationObserver(() => document.getElementById("stop").click())
        .observe(document.getElementById("answer"), {childList: true})"""
    async with console(settings, P, D) as page:
        await page.locator("#mode").select_option("completion")
        await page.locator("#max-tokens").fill("3900")
        await page.evaluate(stop_at_once)
        await page.locator("#send").click()
        await expect(page.locator("#ask-state")).to_have_text("stopped")
        await expect(page.locator("#facts")).to_contain_text("cancelled 1")


async def test_the_page_fits_a_phone(settings):
    async with console(settings, P, D) as page:
        await page.set_viewport_size({"width": 375, "height": 800})
        await ask(page, "x" * (5 * STEP_TOKENS))
        assert await page.evaluate("document.documentElement.scrollWidth") <= 375
        await expect(page.locator("[data-worker=decode-1] [data-name=role]")).to_be_visible()

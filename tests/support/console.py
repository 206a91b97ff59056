"""The router's console over HTTP, and a browser before it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import ConsoleMessage, Page, async_playwright

from router.app import Router


@asynccontextmanager
async def running_router(settings, num_workers: int) -> AsyncIterator[Router]:
    """Once it knows so many workers."""
    router = Router(settings)
    await router.start()
    try:
        async with asyncio.timeout(10):
            while len(router.view.workers) < num_workers:
                await asyncio.sleep(0.01)
        yield router
    finally:
        await router.stop()


@asynccontextmanager
async def browser_page(**options) -> AsyncIterator[Page]:
    """A page of the machine's Chromium. What its console says at the level of errors fails the test."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert executable, "these tests need a Chromium: apt-get install chromium"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        try:
            page = await browser.new_page(**options)
            errors: list[str] = []
            page.on("console", lambda message: _is_error(message) and errors.append(message.text))
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.set_default_timeout(15_000)
            yield page
            assert errors == []
        finally:
            await browser.close()


def _is_error(message: ConsoleMessage) -> bool:
    """That a request was refused is noted by the browser itself."""
    return message.type == "error" and not message.text.startswith(
        "Failed to load resource: the server responded"
    )

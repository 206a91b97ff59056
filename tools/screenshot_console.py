"""Take docs/console.png: the console of a running router, with a little load and a finished run of the playground.

headrace up --prefill 1 --decode 1
python tools/screenshot_console.py http://127.0.0.1:8000 docs/console.png
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

_SIZE = ViewportSize(width=1440, height=1000)
_MAX_BYTES = 300_000
_PROMPTS = [
    "Write a short list of what an engineer who designs a channel for water looks at first.",
    "A headrace is the channel that leads water from a reservoir to a turbine. It has to carry enough water when"
    " demand is high, lose little height on the way, and keep out sand. Explain why it matters as much as the turbine.",
]
_ROUNDS = 3


def main(url: str, target: Path) -> None:
    executable = shutil.which("chromium")
    if executable is None:
        sys.exit("needs Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = browser.new_page(viewport=_SIZE)
        page.goto(f"{url.rstrip('/')}/console")
        expect(page.locator("#link")).to_have_text("live")
        for number in range(_ROUNDS * len(_PROMPTS)):
            # Numbered at the front, so that none finds another one's beginning in a cache.
            _ask(page, f"{number + 1}. {_PROMPTS[number % len(_PROMPTS)]}")
        page.wait_for_timeout(2_000)  # the live view counts what has just ended
        picture = page.screenshot(full_page=True, path=target)
        browser.close()
    if len(picture) > _MAX_BYTES:
        sys.exit(f"{target} has {len(picture)} bytes, more than {_MAX_BYTES}")


def _ask(page: Page, prompt: str) -> None:
    page.locator("#prompt").fill(prompt)
    page.locator("#max-tokens").fill("96")
    page.locator("#send").click()
    expect(page.locator("#ask-state")).to_have_text(re.compile("^(stop|length): "), timeout=60_000)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

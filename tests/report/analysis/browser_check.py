"""Click through a report in a real browser and look at it; run by hand, not by pytest.

    python tests/report/analysis/browser_check.py report.html OUTDIR

Needs playwright and a Chromium (`--browser`, by default /usr/bin/chromium). Writes screenshots in
light and dark at 1280, 390 and 360 pixels and a PDF; fails on console errors, on requests, on pages
that scroll sideways, and on controls or files that do not work.
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


class Checker:
    """Opens pages, remembers everything that went wrong."""

    def __init__(self, browser: Any, report: Path, output: Path) -> None:
        self.browser, self.report, self.output = browser, report.resolve(), output
        self.problems: list[str] = []

    def open(self, width: int, scheme: str, **options: Any) -> Page:
        context = self.browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **options
        )
        page = context.new_page()
        name = f"{width} {scheme}"
        page.on(
            "console",
            lambda message: (
                self.problems.append(f"{name}: console {message.type}: {message.text}")
                if message.type in ("error", "warning")
                else None
            ),
        )
        page.on("pageerror", lambda error: self.problems.append(f"{name}: {error}"))
        page.on("request", lambda request: self.note_request(name, request.url))
        page.goto(self.report.as_uri())
        return page

    def note_request(self, name: str, url: str) -> None:
        if url != self.report.as_uri() and not url.startswith(("data:", "blob:")):
            self.problems.append(f"{name}: the page asked for {url[:200]}")

    def expect(self, condition: Any, words: str) -> None:
        if not condition:
            self.problems.append(words)

    def look(self, page: Page, name: str) -> None:
        sizes = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        self.expect(sizes[0] <= sizes[1], f"{name}: the page is {sizes[0]} wide in {sizes[1]}")
        page.screenshot(path=self.output / f"{name}.png", full_page=True)

    def click_everything(self, page: Page, name: str) -> None:
        """Every value of every list, every box, button and mark, by pointer and by keyboard."""
        for box in page.locator("main input[type=checkbox]").all():
            box.check()
        for select in page.locator("main select:visible").all():
            values = select.locator("option").evaluate_all("all => all.map(one => one.value)")
            if select.is_disabled():
                continue
            for value in [*values[1:6], values[0]]:
                select.select_option(value)
        self.look(page, f"{name}-compared")
        for drawing in page.locator(".plot > svg:visible").all():
            drawing.scroll_into_view_if_needed()
            page.wait_for_timeout(50)  # scrolling hides the tip, a moment later
            drawing.focus()
            for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft"):
                page.keyboard.press(key)
            label = drawing.get_attribute("aria-label")
            self.expect(page.locator("#tip").is_visible(), f"{name}: no tip by key in {label!r}")
            page.keyboard.press("Escape")
            marks = drawing.locator("[data-tip]")
            target = marks.nth(marks.count() // 2) if marks.count() else drawing
            page.mouse.move(0, 0)
            target.hover(force=True)
            self.expect(page.locator("#tip").is_visible(), f"{name}: no tip by mouse in {label!r}")
        for selector in (
            ".plot [data-pick]",
            ".thumbnails button",
            ".tokens span",
            ".tree summary",
        ):
            for index in range(6):  # a click may change how many there are
                targets = page.locator(f"{selector}:visible")
                if index < targets.count():
                    targets.nth(index).click(force=True)
        for button in page.locator("td button:visible").all()[:3]:
            button.click()
        for link in page.locator("nav a").all():
            link.click()

    def save_everything(self, page: Page) -> None:
        folder = self.output / "saved"
        folder.mkdir(exist_ok=True)
        with page.expect_download() as download:
            page.locator("#save-json").click()
        download.value.save_as(folder / "report.json")
        saved = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        beside = json.loads(self.report.with_suffix(".json").read_text(encoding="utf-8"))
        self.expect(saved == beside, "the saved JSON differs from the file beside the report")
        for button in page.locator(".save button:visible").all():
            with page.expect_download(timeout=10_000) as download:
                button.click()
            path = folder / download.value.suggested_filename
            download.value.save_as(path)
            content = path.read_bytes()
            if path.suffix == ".svg":
                ElementTree.fromstring(content)  # well-formed, or it raises
                self.expect(b'fill="var(' not in content, f"{path.name} has unresolved colours")
            else:
                self.expect(content[:4] == b"\x89PNG", f"{path.name} is not a PNG file")
                self.expect(len(content) > 2000, f"{path.name} is almost empty")

    def run(self) -> None:
        for scheme in ("light", "dark"):
            for width in (1280, 390, 360):
                page = self.open(width, scheme, has_touch=width < 400, accept_downloads=True)
                name = f"{width}-{scheme}"
                page.wait_for_timeout(300)
                self.look(page, name)
                self.expect(not page.evaluate("window.broken"), f"{name}: the text ran as a script")
                if width != 390:
                    self.click_everything(page, name)
                    self.look(page, f"{name}-clicked")
                if width == 1280:
                    self.save_everything(page)
                    ground = "getComputedStyle(document.body).backgroundColor"
                    before = page.evaluate(ground)
                    page.locator("#theme").click()
                    self.expect(page.evaluate(ground) != before, f"{name}: the theme stayed")
                    page.pdf(path=self.output / f"{name}.pdf")
                page.context.close()


def main() -> None:
    """Check one report; exit with 1 and a line per problem, if there are any."""
    parser = argparse.ArgumentParser(description="Click through a report in a real browser.")
    parser.add_argument("report", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=arguments.browser, args=CHROMIUM_FLAGS)
        checker = Checker(browser, arguments.report, arguments.output)
        checker.run()
        browser.close()
    for problem in dict.fromkeys(checker.problems):
        print(problem, file=sys.stderr)
    print(f"{len(checker.problems)} problems; screenshots in {arguments.output}")
    sys.exit(1 if checker.problems else 0)


if __name__ == "__main__":
    main()

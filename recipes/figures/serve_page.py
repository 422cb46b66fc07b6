"""Pictures of a running server's page, light and dark, on a phone and on a desktop.

python recipes/figures/serve_page.py http://127.0.0.1:8000 docs [--prompt TEXT] [--key KEY]

Needs `pip install playwright` and a chromium. Nothing is drafted from earlier texts, so the speed
shown is that of a new prompt. It is used by the keyboard alone; a script that fails, a page that
scrolls sideways, a request to another host or another text than the plain one is an error.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

PROMPT = "The fox was hungry. He saw a big red bird on the old bridge and"
SIZES = {"phone": (390, 844), "desktop": (1280, 860)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--key", default="")
    args = parser.parse_args()
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            for name, (width, height) in SIZES.items():
                page = browser.new_page(viewport={"width": width, "height": height},
                                        color_scheme=scheme)
                picture = args.folder / f"serve-{name}-{scheme}.png"
                print(picture, *take(page, args.url, args.prompt, args.key), sep="  ", flush=True)
                page.screenshot(path=picture, full_page=name == "phone")
                page.close()
        browser.close()


def take(page, url: str, prompt: str, key: str) -> list[str]:
    """Have it write; return what it says of its speed."""
    requests, problems = list[str](), list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(url)
    if key:
        page.fill("#key", key)
    page.locator("#key").blur()
    page.wait_for_selector("#model option", state="attached")
    page.focus("#prompt")
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(prompt)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#same:not(:empty)", timeout=120_000)
    verdict = page.text_content("#same")
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    outside = [address for address in requests
               if not address.startswith((url.rstrip("/"), "data:"))]
    if "same text" not in verdict or wide > 0 or problems or outside:
        raise SystemExit(f"{verdict} {wide} {problems} {outside}")
    return [f"{name} {page.text_content(f'#{name}')}" for name in ("rate", "plain", "times",
                                                                  "accepted")]


if __name__ == "__main__":
    main()

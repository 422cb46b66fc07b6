"""A hook of mkdocs: links that leave docs/ lead to the repository, or are plain text without it."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?!\.\.)[^)]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite `[name](../path)` of pages that lie directly in docs/."""
    if "/" in page.file.src_uri:
        return markdown
    url = (config.repo_url or "").rstrip("/")
    return OUTSIDE.sub(rf"[\1]({url}/blob/main/\2)" if url else r"\1", markdown)

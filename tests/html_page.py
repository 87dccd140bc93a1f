"""A page that heddle writes, as a browser would take it apart."""

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "input"}
LOADING = {"src", "href", "srcset", "data", "action", "poster", "background"}


class Page(HTMLParser):
    """Checks that elements nest and that a page's policy allows its scripts and nothing else.

    Keeps the text outside scripts, what is loaded, the scripts, and the sources of each directive of the policy.
    programs: indices of the scripts that are not data. unhashed: what could run without a hash.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.programs: list[int] = []
        self.unhashed: list[str] = []
        self.policy: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []
        if "html" in self.tags:
            self.check_policy()

    def check_policy(self) -> None:
        """The policy names the hash of each script that the page holds, and nothing else may run."""
        hashes = [b64encode(sha256(self.scripts[index].encode()).digest()).decode() for index in self.programs]
        assert self.policy.get("default-src") == ["'none'"]
        assert self.policy.get("script-src") == ([f"'sha256-{each}'" for each in hashes] or ["'none'"])
        assert self.unhashed == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = {name: value or "" for name, value in attrs}
        self.ids += [values["id"]] if "id" in values else []
        self.unhashed += [name for name in values if name.startswith("on")]
        self.unhashed += [value for value in values.values() if re.match(r"\s*javascript:", value, re.IGNORECASE)]
        if values.get("http-equiv") == "Content-Security-Policy":
            parts = (directive.split() for directive in values["content"].split(";"))
            self.policy |= {name: sources for name, *sources in parts}
        self.loads += [value or "" for name, value in attrs if name in LOADING and tag != "details"]
        if tag == "script":
            self.unhashed += [] if self.policy else ["a script above the policy"]
            self.programs += [] if values.get("type") == "application/json" else [len(self.scripts)]
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        elif self.open[-1:] != ["style"]:
            self.words.append(data)

    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

"""An agent over the Model Context Protocol: proposals, verdicts and refusals as `heddle judge` gives them."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from heddle.lab.judge.judge import judge
from tests import small
from tests.clients.folders import run_client

LEDGER: dict[str, Any] = {
    "tokens": 2048, "sequence_length": 16, "batch_size": 4, "pairs": 2, "windows": 4, "second": 0, "vocab_size": 300,
    "lr": 1e-4, "quiet": True, "device": "cpu", "threads": 1,
}  # fmt: skip
WIDER = {"overrides": ["layers.*.feedforward.hidden=32"]}
AHEAD = {"overrides": ["layers.0.mixer.causal=false"]}
NARROW = "name: narrow\ndesign: mine.yaml\n"


async def proposed(ledger: Path) -> list[Any]:
    """The names of the tools, and what they answer."""
    words = ["-m", "heddle", "judge", "mcp", "--out", str(ledger), "--device", "cpu", "--threads", "1"]
    parameters = StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ))
    async with stdio_client(parameters) as pipes, ClientSession(*pipes) as session:
        told = await session.initialize()
        assert "How to propose a change" in (told.instructions or "")
        found: list[Any] = [sorted(tool.name for tool in (await session.list_tools()).tools)]

        async def call(tool: str, **values: Any) -> None:
            content = (await session.call_tool(tool, values)).content[0]
            found.append(json.loads(content.text))

        await call("submit", proposal=yaml.safe_dump(WIDER))
        await call("submit", proposal=yaml.safe_dump(AHEAD))
        narrow = small.design(layers=[{**small.design()["layers"][0], "feedforward": {"kind": "mlp", "hidden": 8}}])
        await call("submit", proposal=NARROW, files={"mine.yaml": yaml.safe_dump(narrow)})
        await call("submit", proposal="overrides: {width: 16}")
        await call("submit", proposal=NARROW, files={"../mine.yaml": ""})
        await call("show")
        return found


def main(folder: Path) -> str:
    """Make two equal ledgers; what the tools answer on one is what the command answers on the other."""
    design, text = small.design_file(folder / "good.yaml", small.design()), small.folder(folder / "text")
    for ledger in ("told", "commanded"):
        judge("init", design, data=[str(text)], out=folder / ledger, **LEDGER)
    tools, wider, ahead, narrow, unread, outside, shown = asyncio.run(proposed(folder / "told"))
    assert tools == ["show", "submit"]
    (folder / "proposal.yaml").write_text(yaml.safe_dump(WIDER))
    expected = judge("submit", folder / "proposal.yaml", out=folder / "commanded", quiet=True, device="cpu", threads=1)
    assert wider == expected, (wider, expected)
    assert (ahead["verdict"], ahead["rule"]) == ("refused", "causality")
    assert (narrow["name"], "rule" in narrow) == ("narrow", False)
    assert "overrides" in unread["error"]
    assert "name without folders" in outside["error"]
    assert [each["number"] for each in shown["proposals"]] == [1, 2, 3]
    assert yaml.safe_load(shown["design"])["width"] == 16
    return f"4 verdicts and refusals over the protocol; the first equals the command's: {wider['sentence']}"


if __name__ == "__main__":
    run_client(main, "mcp")

"""What the site holds: the order of its pages, and where each file of the repository goes.

A page that no group names goes with the README of its folder, or else into the last group, so that none is lost.
"""

import posixpath
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GROUPS: dict[str, tuple[str, ...]] = {
    "Start": (
        "README.md", "docs/README.md", "docs/start/README.md", "docs/start/researcher.md", "docs/start/engineer.md",
        "docs/start/student.md", "docs/start/size.md", "docs/start/download.md", "docs/tour.md", "docs/glossary.md",
    ),
    "Designs": (
        "docs/parts/README.md", "docs/parts/mixers.md", "docs/parts/positions.md", "docs/parts/scalings.md",
        "docs/parts/norms.md", "docs/parts/feedforwards.md", "docs/parts/residuals.md", "docs/parts/model.md",
        "docs/parts/kernels.md", "docs/explore.md", "docs/add-a-part.md", "docs/states-and-layouts.md",
        "docs/layouts.md", "docs/encoders.md",
    ),
    "Train and compare": (
        "docs/training.md", "docs/training/data.md", "docs/training/settings.md", "docs/training/learning-rates.md",
        "docs/training/widths.md", "docs/training/precision.md", "docs/training/finetune.md", "docs/lora.md",
        "docs/training/conversations.md", "docs/training/tasks.md", "docs/training/files.md",
        "docs/training/resume.md", "docs/training/signals.md", "docs/runs.md",
        "docs/compare.md", "docs/compare/reading.md", "docs/compare/intervals.md", "docs/compare/seeds.md",
        "docs/compare/budgets.md", "docs/compare/variants.md", "docs/compare/equal-size.md",
        "docs/compare/tuning.md", "docs/compare/abilities.md", "docs/compare/losses.md",
        "docs/compare/longer-texts.md", "docs/compare/machines.md", "docs/ladder.md", "docs/ladder/budget.md",
        "docs/ladder/tokens.md", "docs/judge.md", "docs/inspect.md",
        "docs/gpu.md", "docs/gpu/budgets.md",
        "docs/ranks.md", "docs/ranks/pieces.md", "docs/cluster.md", "docs/plan.md",
        "docs/plan/accuracy.md",
    ),
    "Convert": (
        "docs/convert.md", "docs/convert/healing.md", "docs/add-a-rewrite.md",
    ),
    "Hugging Face": (
        "docs/huggingface/README.md", "docs/huggingface/loading.md", "docs/huggingface/quantized.md",
        "docs/huggingface/encoders.md", "docs/huggingface/families.md",
        "docs/huggingface/generation.md", "docs/huggingface/training.md", "docs/huggingface/peft.md",
        "docs/huggingface/serving.md", "docs/huggingface/compile.md", "docs/huggingface/published.md",
    ),
    "Serve": (
        "docs/generation.md", "docs/serve.md", "docs/serve/requests.md", "docs/serve/limits.md",
        "docs/deploy/README.md", "docs/deploy/transformers.md", "docs/deploy/llama-cpp.md", "docs/deploy/ollama.md",
        "docs/deploy/vllm.md", "benchmarks/results/transcript.md", "benchmarks/results/gemma.md",
        "docs/conformance.md",
    ),
    "Evidence": (
        "docs/evidence.md", "docs/extrapolation.md", "docs/residuals.md", "docs/experts.md", "docs/digits.md",
        "benchmarks/README.md",
    ),
    "Correctness": (
        "docs/laws.md", "docs/rank-laws.md", "docs/commonly-wrong.md", "docs/shipped-bugs.md", "docs/reliability.md",
        "docs/edges.md",
        "benchmarks/results/parts.md",
    ),
    "Project": (
        "CONTRIBUTING.md", "SECURITY.md", "THIRD_PARTY.md", "CHANGELOG.md",
        "docs/not-here.md", "docs/decisions/README.md", "docs/log.md",
    ),
    "More": (),
}  # fmt: skip
# What readers ask the search for, in words that the page's title lacks.
KEYWORDS = {
    "docs/plan.md": "out of memory, oom, kv cache size, gpu memory, vram",
    "docs/start/size.md": "kv cache size, halve the cache",
    "docs/convert.md": "gqa, mla, halve the cache, sliding window",
    "docs/ranks.md": "multi gpu, ddp, fsdp, tensor parallel, expert parallel",
    "docs/training/data.md": "tokenizer, vocabulary, corpus",
    "docs/training/files.md": "checkpoint format, log, perplexity",
    "docs/serve/requests.md": "log probabilities, logprobs",
    "docs/compare/tuning.md": "tune, learning rate tuning, hyperparameters",
    "docs/deploy/llama-cpp.md": "export gguf",
    "docs/generation.md": "speculative decoding, draft model",
    "docs/parts/mixers.md": "sliding window, local attention, latent attention, mla, gqa, linear attention",
    "docs/experts.md": "router, aux loss, moe",
    "docs/add-a-part.md": "add position encoding, new mixer",
    "docs/serve.md": "openai api",
}
RESULTS = ("benchmarks/results", "evidence/results")
TRANSLATED = ".zh.md"
SHOWN = (".py", ".yaml", ".yml", ".json", ".sh", ".txt", ".toml", ".sbatch", "")
IMAGES = (".png", ".svg", ".jpg")


@dataclass(frozen=True)
class Page:
    """A Markdown file and the page it becomes, both relative to their roots."""

    source: str
    target: str

    @property
    def twin(self) -> str:
        """The same page in the other language, if it exists."""
        plain = self.source.removesuffix(TRANSLATED)
        return f"{plain}.md" if plain != self.source else self.source.removesuffix(".md") + TRANSLATED

    @property
    def language(self) -> str:
        """Of its text, as HTML names it."""
        return "zh" if self.source.endswith(TRANSLATED) else "en"


def groups() -> dict[str, list[Page]]:
    """The pages of each group, in order; a file that does not exist is left out. Translations are in no group."""
    present = {path: Page(path, target_of(path)) for path in markdown_files()}
    listed = {name: [present.pop(path) for path in paths if path in present] for name, paths in GROUPS.items()}
    for path, page in sorted(present.items()):
        if not path.endswith(TRANSLATED):
            first = f"{posixpath.dirname(path)}/README.md"
            group = next(
                (name for name, paths in GROUPS.items() if first in paths and first != "docs/README.md"), "More"
            )
            listed[group].append(page)
    return {name: pages for name, pages in listed.items() if pages}


def pages() -> list[Page]:
    """Every page that is written in Markdown."""
    return [Page(path, target_of(path)) for path in markdown_files()]


@cache
def markdown_files() -> tuple[str, ...]:
    """The Markdown files of the site, relative to the repository."""
    top = [
        *ROOT.glob("README*.md"),
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        ROOT / "THIRD_PARTY.md",
        ROOT / "CHANGELOG.md",
        ROOT / "benchmarks/README.md",
        ROOT / "benchmarks/results/transcript.md",
        ROOT / "benchmarks/results/gemma.md",
        ROOT / "benchmarks/results/parts.md",
    ]
    files = [path for path in (*top, *(ROOT / "docs").rglob("*.md")) if path.is_file()]
    return tuple(sorted(path.relative_to(ROOT).as_posix() for path in files))


def shown_files(folder: Path) -> list[Path]:
    """The files of a folder that a page can show: text and images, sorted."""
    return sorted(file for file in folder.iterdir() if file.is_file() and file.suffix in {*SHOWN, *IMAGES})


def target_of(path: str) -> str:
    """Where a file of the repository goes: `docs/README.md` -> `docs/index.html`, `a/b.py` -> `a/b.py.html`."""
    folder, name = posixpath.split(path)
    if name.endswith(".md"):
        stem = name.removesuffix(".md")
        name = (f"index{stem.removeprefix('README')}" if stem.startswith("README") else stem) + ".html"
    elif not name.endswith(IMAGES):
        name += ".html"
    return posixpath.join(folder, name)


def relative(target: str, page: str) -> str:
    """A link from a written page to another."""
    return _from_folder(target, posixpath.dirname(page) or ".")


@cache
def _from_folder(target: str, folder: str) -> str:
    return posixpath.relpath(target, folder)

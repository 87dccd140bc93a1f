"""What the site holds: the order of its pages, and what readers ask for in words that a page lacks."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The menu: pages without `.md`; `*` stands for what is not named before it.
GROUPS = {
    "Start": (
        "docs/README docs/start/README docs/start/researcher docs/start/engineer docs/start/student docs/start/size "
        "docs/start/download docs/tour docs/glossary docs/notebooks api/index"
    ),
    "Designs": (
        "docs/parts/README docs/parts/mixers docs/parts/positions docs/parts/scalings docs/parts/norms "
        "docs/parts/feedforwards docs/parts/residuals docs/parts/* docs/explore docs/add-a-part "
        "docs/states-and-layouts docs/layouts docs/encoders"
    ),
    "Train and compare": (
        "docs/options docs/training docs/training/data docs/training/settings docs/training/* docs/lora docs/runs "
        "docs/compare docs/compare/reading docs/compare/* docs/ladder docs/ladder/* docs/judge docs/inspect docs/gpu "
        "docs/gpu/* docs/ranks docs/ranks/* docs/cluster docs/plan docs/plan/*"
    ),
    "Convert": "docs/convert docs/convert/* docs/add-a-rewrite",
    "Hugging Face": "docs/huggingface/README docs/huggingface/loading docs/huggingface/*",
    "Serve": (
        "docs/generation docs/serve docs/serve/* docs/chat docs/deploy/README docs/deploy/* "
        "benchmarks/results/transcript benchmarks/results/gemma docs/conformance"
    ),
    "Evidence": (
        "docs/evidence docs/extrapolation docs/residuals docs/experts docs/digits benchmarks/README docs/benchmarks "
        "docs/speed"
    ),
    "Correctness": (
        "docs/laws docs/rank-laws docs/commonly-wrong docs/shipped-bugs docs/reliability docs/edges "
        "benchmarks/results/*"
    ),
    "Project": "CONTRIBUTING SECURITY THIRD_PARTY CHANGELOG docs/not-here docs/decisions/* docs/log",
}
# Found under these words first, though the page's title lacks them.
KEYWORDS = {
    "docs/plan": "ran out of memory, out of memory, oom, kv cache size, gpu memory, vram",
    "docs/start/size": "kv cache size, halve the cache",
    "docs/convert": "gqa, mla, halve the cache, sliding window",
    "docs/ranks": "multi gpu, ddp, fsdp, tensor parallel, expert parallel",
    "docs/training/data": "tokenizer, vocabulary, corpus",
    "docs/training/files": "checkpoint format, log, perplexity",
    "docs/serve/requests": (
        "log probabilities, logprobs, function calling, tools, structured output, json schema, stop strings, extra_body"
    ),
    "docs/serve/limits": (
        "prompt too long, prompt longer than the context, context_length_exceeded, cancel a request, "
        "client disconnects, timeout, rate limit, queue"
    ),
    "docs/compare/tuning": "tune, learning rate tuning, hyperparameters",
    "docs/deploy/llama-cpp": "export gguf",
    "docs/generation": "speculative decoding, draft model",
    "docs/parts/mixers": "sliding window attention, local attention, latent attention, mla, gqa, linear attention",
    "docs/experts": "router, router aux loss, moe",
    "docs/add-a-part": "add position encoding, new mixer",
    "docs/serve": (
        "openai api, openai compatible api, openai client, https, tls, api key, secure the server, reverse proxy, "
        "port already in use, address already in use, shut down, stop the server, ctrl-c during an answer, "
        "no chat template, memory of the server, tokens per second of serve"
    ),
    "docs/deploy/README": "deploy, production, other servers",
}
FOLDERS = ("benchmarks/results", "benchmarks/results/*/", "examples/cluster")  # listed, as pages link to them

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
    "docs/plan": (
        "ran out of memory, out of memory, oom, kv cache size, gpu memory, vram, how long will it take, training time, "
        "long training take"
    ),
    "docs/start/size": "kv cache size, kv cache bytes, big kv cache, memory budget, halve the cache, parameters",
    "docs/start/download": "download, hugging face model, compare logits",
    "docs/convert": (
        "gqa, mla, halve cache, reduce cache, shrink cache, smaller cache, compress cache, sliding window, pruning, "
        "merge models"
    ),
    "docs/ranks": "multi gpu, ddp, fsdp, tensor parallel, expert parallel",
    "docs/cluster": "slurm, cluster, torchrun",
    "docs/training/data": "tokenizer, vocabulary, corpus, my own text, my own data, dataset",
    "docs/training/files": "checkpoint format, log, perplexity",
    "docs/training/settings": "gradient checkpointing, recompute, batch size, loss spike, optimizer",
    "docs/training/resume": "reproducible, deterministic",
    "docs/training/precision": "bfloat16, mixed precision, fp8",
    "docs/training/tasks": "needle in a haystack, passkey",
    "docs/serve": (
        "openai api, openai client, streaming, https, tls, api key, secure server, securing serve, reverse proxy, "
        "port in use, address in use, shut down, stop serve, ctrl c answer, no chat template, memory server, "
        "tokens per second serve"
    ),
    "docs/serve/requests": (
        "log probabilities, logprobs, stop tokens, temperature, top_p, function calling, tools, structured output, "
        "json schema, extra_body"
    ),
    "docs/serve/limits": (
        "prompt too long, prompt longer, context_length_exceeded, cancel, disconnect, timeout, rate limit, queue"
    ),
    "docs/deploy/README": "deploy, production, other servers",
    "docs/compare": "compare designs, compare text, measure loss, evaluate loss, bits per byte, perplexity my model",
    "docs/compare/budgets": "comparison cost, comparison takes, ctrl c, interrupt comparison, budget short",
    "docs/compare/reading": "uncertainty, sure result",
    "docs/compare/tuning": "tune, learning rate tuning, best learning rate, fair learning rate, hyperparameters",
    "docs/ladder": "scaling law, chinchilla",
    "docs/deploy/llama-cpp": "export gguf",
    "docs/generation": "speculative decoding, draft model, sampling, temperature, top_k, top_p, beam search",
    "docs/huggingface/encoders": "minilm, sentence transformers, bert",
    "docs/huggingface/families": "which models, supported models, llama, deepseek, qwen, mistral, gemma",
    "docs/huggingface/quantized": "quantization, int8, int4",
    "docs/huggingface/serving": "hellaswag, mmlu, eval harness",
    "docs/parts/mixers": (
        "sliding window attention, local attention, latent attention, mla, gqa, linear attention, value embedding"
    ),
    "docs/parts/feedforwards": "shared experts, mixture of experts, swiglu",
    "docs/experts": "router, router aux loss, moe",
    "docs/speed": "tokens per second",
    "docs/add-a-part": (
        "add position encoding, new mixer, own mixer, custom mixer, custom attention, own attention, "
        "own part, new part, add part"
    ),
    "CONTRIBUTING": "new command, add command, own command, new verb, add verb, own verb, new subcommand, run tests",
}
FOLDERS = ("benchmarks/results", "benchmarks/results/*/", "examples/cluster")  # listed, as pages link to them

"""The museum: bugs that shipped elsewhere and can exist here, each with what kills it.

A bug of a part is planted in `tests/laws/test_planted.py`, where a law fails on it, any other in
`tests/museum/mutants.py`, where a test does: it stands here by the planted bug's description. docs/shipped-bugs.md
tells readers of them.
"""

from typing import NamedTuple


class Exhibit(NamedTuple):
    """A bug. source: where it shipped. killers: descriptions of planted bugs, which all must be caught."""

    source: str
    killers: tuple[str, ...]


# fmt: off
EXHIBITS = (
    # Positions
    Exhibit("huggingface/transformers#25199", ("a rotary table of one layout used with pairs of the other",)),
    Exhibit("ggml-org/llama.cpp#2376", ("keys permuted with the number of query heads",)),
    Exhibit("EleutherAI/gpt-neox#1003", ("rotary angles computed in the model's bfloat16",)),
    Exhibit("NVIDIA/Megatron-LM#744", ("rotary frequencies in a buffer that a dtype conversion rounds",)),
    Exhibit("huggingface/transformers#25104", ("rotary frequencies chosen by the tokens read so far",)),
    Exhibit("huggingface/transformers#27033", ("rotary frequencies changed by a long text and not restored",)),
    Exhibit("unslothai/unsloth#4078", ("the first row's positions used for every row",)),
    Exhibit("thu-nics/C2C#19", ("positions that restart in every chunk",)),
    Exhibit("huggingface/transformers#43082", ("absolute positions counted from the start of the call",)),
    Exhibit("Sudharsanselvaraj/Token-Print#268", ("slots of a ring buffer used as positions",)),
    Exhibit("Lightning-AI/litgpt, odd rotary dims", ("the last dims of a head rotated instead of the first",)),
    Exhibit("Open-Athena/MarinFold#184", ("the base of the rotary frequencies left out of an export",)),
    # Caches, windows, masks
    Exhibit("huggingface/transformers#37574", ("a ring buffer unrolled one step too far",)),
    Exhibit("huggingface/transformers#47708", ("ring buffer slots off by one",)),
    Exhibit("huggingface/transformers#45940", ("attention to unused slots beyond the text",)),
    Exhibit("lablup/mlxcel#678", ("a ring buffer overwritten before it is read",)),
    Exhibit("NVIDIA-NeMo/Megatron-Bridge#2656", ("a window one key too wide",)),
    Exhibit("pytorch/pytorch#108108", ("a causal mask aligned to the first key instead of the last",)),
    Exhibit("huggingface/transformers#48821", ("a causal mask left out",)),
    Exhibit("pytorch/pytorch#101967", ("unused slots multiplied by weights of zero",)),
    Exhibit("vllm-project/vllm#23279", ("a chunk that ignores the chunks before it",)),
    Exhibit("LMCache/LMCache#4385", ("a fork that shares its keys with the original",)),
    Exhibit("ml-explore/mlx-lm#1494", ("every row rolled back by the first row's number of tokens",)),
    Exhibit("huggingface/nanoVLM#204", ("document boundaries left out of the mask",)),
    Exhibit("lablup/mlxcel#405", ("a ring buffer overwritten before it is read",)),
    Exhibit("pytorch/pytorch#103749", ("a query without keys that sees something",)),
    Exhibit("huggingface/candle#3743", ("a causal mask aligned to the first key instead of the last",)),
    Exhibit("tenstorrent/tt-metal#48899", ("a grown cache with its tokens moved to the end",)),
    # Heads, norms, numerics
    Exhibit("onnx/onnx#7274", ("key heads tiled instead of repeated",)),
    Exhibit("EleutherAI/gpt-neox#1345", ("an epsilon outside the square root",)),
    Exhibit("ggml-org/llama.cpp#11446", ("absorbed values sliced from the wrong end",)),
    Exhibit("fla-org/flash-linear-attention#1198", ("a division of zero by zero",)),
    Exhibit("pytorch/vision#7722", ("one dropout module for both branches",)),
    Exhibit("mosaicml/composer#376", ("surviving branches that are not rescaled",)),
    Exhibit("google/gemma_pytorch#67", ("an offset forgotten by the fused norm",)),
    Exhibit("meta-pytorch/torchtune#152", ("the default epsilon in an export",)),
    Exhibit("meta-llama/llama#1048", ("a norm in half precision",)),
    Exhibit("huggingface/transformers#28163", ("scores rounded to bfloat16 before the softmax",)),
    Exhibit("fla-org/flash-linear-attention#77", ("decays as differences of cumulative sums",)),
    Exhibit("idiap/fast-transformers#32", ("keys and values summed in half precision",)),
    # Experts
    Exhibit("huggingface/transformers#28505", ("padding in the expert counts", "padding in the z-loss")),
    Exhibit("NVIDIA-NeMo/Automodel#3359", ("a balance loss that depends on the number of rows in a call",)),
    Exhibit("pytorch/torchtitan#1593", ("recomputed layers recorded twice",)),
    Exhibit("ViperEkura/AstrAI#57", ("router logits in bfloat16", "ties resolved to the highest index")),
    Exhibit("huggingface/transformers#48237", ("a nonzero gradient for an idle expert",)),
    Exhibit("huggingface/transformers#31464", ("the auxiliary losses of all layers but the last forgotten",)),
    Exhibit("pytorch/torchtitan#3686", ("a balancing bias that only the first layer gets",)),
    Exhibit("NVIDIA/Megatron-LM#955", ("gates from a softmax over all experts instead of the chosen",)),
    # Training and resume
    Exhibit("huggingface/transformers#34191", ("gradients averaged by the micro-batch",)),
    Exhibit("huggingface/transformers#40691", (
        "the order of the first epoch repeated", "a resumed run that begins with the first batch again")),
    Exhibit("areal-project/AReaL#1292", ("copies of bfloat16 weights in bfloat16",)),
    Exhibit("pytorch/pytorch#46849", ("a gradient that is not finite clipped and applied",)),
    Exhibit("ml-explore/mlx-lm#1658", ("moments that are not finite taken for good",)),
    Exhibit("Lightning-AI/pytorch-lightning#19970", ("a checkpoint that is not synced before it gets its name",)),
    Exhibit("kyutai-labs/pocket-tts#262", ("damaged checkpoints counted among those that stay",)),
    Exhibit("NVIDIA-NeMo/Megatron-Bridge#5257", ("the state of the random numbers not restored",)),
    Exhibit("pytorch/torchtitan#1261", ("a first step with a learning rate of 0",)),
    Exhibit("huggingface/transformers#38870", ("a tied head with a weight of its own",)),
    Exhibit("meta-pytorch/torchtune#949", ("the token that ends an answer never learned",)),
    Exhibit("huggingface/safetensors#762", ("a file written over the one whose tensors are saved",)),
    Exhibit("unslothai/unsloth-zoo#1095", ("1 added twice to norm weights on the way out",)),
    Exhibit("allenai/OLMo-core, its step that is skipped", ("an update multiplied by zero instead of left out",)),
    Exhibit("a tokenizer whose ids were exchanged", ("a tokenizer exchanged for another of as many tokens",)),
    # Generation and serving
    Exhibit("huggingface/transformers#21435", ("a filter that may leave no token",)),
    Exhibit("openai/tiktoken#195", ("runs of letters of any length",)),
    Exhibit("ggml-org/llama.cpp#24496", ("a text that is written on after its reader left",)),
)
# Bugs that cannot be written here, and why.
CANNOT_EXIST = {
    "PrimeIntellect-ai/prime-rl#2681": "no code repeats keys: a group of heads reads the one copy",
    "huggingface/transformers#45662": "no rank holds experts of its own: experts are sharded by rows like every weight",
    "numpy seeds of loader workers": "no loader draws: a sample is a function of seed and step",
}
# fmt: on

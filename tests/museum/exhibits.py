"""The museum: bugs that shipped elsewhere and can exist here, each with what kills it.

A bug of a part is planted in `tests/laws/test_planted.py`, which shows that a law fails on it: it stands here by the
planted bug's description. A bug of training, files, exchange or generation has a test of its own, named by file and
function. docs/shipped-bugs.md tells readers of them.
"""

from typing import NamedTuple


class Exhibit(NamedTuple):
    """A bug. source: where it shipped. killers: descriptions of planted bugs, or `path::test`."""

    source: str
    killers: tuple[str, ...]


# fmt: off
EXHIBITS = (
    # Positions
    Exhibit("huggingface/transformers#25199", ("a rotary table of one layout used with pairs of the other",)),
    Exhibit("ggml-org/llama.cpp#2376", ("tests/exchange/test_families.py",)),
    Exhibit("EleutherAI/gpt-neox#1003", ("rotary angles computed in the model's bfloat16",)),
    Exhibit("NVIDIA/Megatron-LM#744", ("rotary frequencies in a buffer that a dtype conversion rounds",)),
    Exhibit("huggingface/transformers#25104", ("rotary frequencies chosen by the tokens read so far",)),
    Exhibit("huggingface/transformers#27033", ("rotary frequencies changed by a long text and not restored",)),
    Exhibit("unslothai/unsloth#4078", ("the first row's positions used for every row",)),
    Exhibit("thu-nics/C2C#19", ("positions that restart in every chunk",)),
    Exhibit("huggingface/transformers#43082", ("absolute positions counted from the start of the call",)),
    Exhibit("Sudharsanselvaraj/Token-Print#268", ("slots of a ring buffer used as positions",)),
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
    # Heads, norms, numerics
    Exhibit("onnx/onnx#7274", ("key heads tiled instead of repeated",)),
    Exhibit("EleutherAI/gpt-neox#1345", ("an epsilon outside the square root",)),
    Exhibit("ggml-org/llama.cpp#11446", ("absorbed values sliced from the wrong end",)),
    Exhibit("fla-org/flash-linear-attention#1198", ("a division of zero by zero",)),
    Exhibit("pytorch/vision#7722", ("one dropout module for both branches",)),
    Exhibit("mosaicml/composer#376", ("surviving branches that are not rescaled",)),
    # Experts
    Exhibit("huggingface/transformers#28505", ("padding in the expert counts", "padding in the z-loss")),
    Exhibit("NVIDIA-NeMo/Automodel#3359", ("a balance loss that depends on the number of rows in a call",)),
    Exhibit("pytorch/torchtitan#1593", ("recomputed layers recorded twice",)),
    Exhibit("ViperEkura/AstrAI#57", ("router logits in bfloat16", "ties resolved to the highest index")),
    Exhibit("huggingface/transformers#48237", ("a nonzero gradient for an idle expert",)),
    # Training and resume
    Exhibit("huggingface/transformers#34191", ("tests/training/test_step.py",)),
    Exhibit("huggingface/transformers#40691", ("tests/training/test_resume.py", "tests/training/test_kills.py")),
    Exhibit("areal-project/AReaL#1292", ("tests/training/test_master_weights.py",)),
    Exhibit("pytorch/pytorch#46849", ("tests/training/test_not_finite.py",)),
    Exhibit("ml-explore/mlx-lm#1658", (
        "tests/training/test_first_non_finite.py"
        "::test_nothing_moves_and_the_place_is_named_wherever_a_number_is_not_finite",)),
    Exhibit("Lightning-AI/pytorch-lightning#19970", ("tests/storage/test_crash_points.py",)),
    Exhibit("kyutai-labs/pocket-tts#262", ("tests/storage/test_checkpoints.py",)),
    # Generation
    Exhibit("huggingface/transformers#21435", ("tests/generation/test_sampling.py",)),
    Exhibit("openai/tiktoken#195", ("tests/tokenization/test_tokenizer.py",)),
)
# fmt: on

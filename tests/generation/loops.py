"""Reference loops for generation: everything is recomputed for each token, without any state."""

import torch
from torch import Tensor

from heddle.config import Config
from heddle.generation.decode import GenerationRequest, ModelRunner, PinnedDecoder, Sampler
from heddle.laws.harness import encoder_output_for, forward_no_grad, random_tokens
from heddle.laws.shrink import shrink
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.model.presets import KINDS
from tests.cases import CASES, case


def greedy_loop(model: Decoder, prompt: list[int], steps: int) -> list[int]:
    """Greedy decoding that recomputes the whole text for each token."""
    row = list(prompt)
    model.eval()
    with torch.no_grad():
        for _ in range(steps):
            logits = model.head(forward_no_grad(model, torch.tensor([row])))[0, -1]
            row.append(int((logits == logits.max()).nonzero()[0]))
    return row[len(prompt) :]


def amplify_layers(model: Decoder) -> Decoder:
    """Scale the layers up against the embedding, so that greedy text varies instead of repeating one token."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and name.startswith("layers."):
                parameter.mul_(30.0)
    return model


def designs() -> dict[str, ModelConfig]:
    """A small config of each kind of preset, and the first case of each mixer that no preset has."""
    configs = {kind: shrink(load_config(f"preset:{kind}-tiny")) for kind in KINDS}
    covered_mixers = {mixer for config in configs.values() for mixer in _mixer_kinds(config)}
    for name in CASES:
        new_mixers = _mixer_kinds(case(name)) - covered_mixers
        if new_mixers and is_causal(case(name)):
            configs[name] = case(name)
            covered_mixers |= new_mixers
    return configs


def is_causal(config: ModelConfig) -> bool:
    """Whether a config can continue texts: it hides later tokens. For lists of cases, so nothing is built."""
    return all(layer.mixer is None or _hides_later_tokens(layer.mixer) for _, layer in config.expand())


def _hides_later_tokens(part: Config) -> bool:
    inner = (getattr(part, name) for name in type(part).model_fields)
    return getattr(part, "causal", True) and all(
        _hides_later_tokens(each) for each in inner if isinstance(each, Config)
    )


def _mixer_kinds(config: ModelConfig) -> set[str]:
    return {layer.mixer.kind for _, layer in config.expand() if layer.mixer is not None}


def next_log_probs(model: Decoder, row: list[int]) -> Tensor:
    """log p of each token after a row, float64 [vocab]."""
    with torch.no_grad():
        return model.head(forward_no_grad(model, torch.tensor([row])))[0, -1].double().log_softmax(-1)


def most_likely_text(model: Decoder, prompt: list[int], steps: int, eos_id: int | None) -> tuple[list[int], float]:
    """The text of at most `steps` tokens with the highest log p per token, found by trying all texts."""
    best: tuple[list[int], float] = ([], float("-inf"))

    def follow(text: list[int], total: float) -> None:
        nonlocal best
        for token, log_p in enumerate(next_log_probs(model, [*prompt, *text]).tolist()):
            longer = [*text, token]
            if token != eos_id and len(longer) < steps:
                follow(longer, total + log_p)
            elif (total + log_p) / len(longer) > best[1]:
                best = longer, (total + log_p) / len(longer)

    follow([], 0.0)
    return best


def beam_search_loop(model: Decoder, prompt: list[int], steps: int, num_beams: int, eos_id: int | None) -> list[int]:
    """Beam search written plainly: sorted lists of (text, log p)."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[tuple[list[int], float]] = []
    for _ in range(steps):
        longer: list[tuple[list[int], float]] = []
        for text, total in live:
            for token, log_p in enumerate(next_log_probs(model, [*prompt, *text]).tolist()):
                (done if token == eos_id else longer).append(([*text, token], total + log_p))
        live = sorted(longer, key=lambda candidate: -candidate[1])[:num_beams]
    return max(done + live, key=lambda candidate: candidate[1] / len(candidate[0]))[0]


def pinned_decoder(model: Decoder, prompt: int, tokens: int, limit: int) -> PinnedDecoder:
    """A decoder of so many tokens after a random prompt of two rows, whose first token of the limit is chosen."""
    prompts = random_tokens(model.config, 2, prompt)
    state = model.init_state(2, limit, encoder_output_for(model, 2))
    runner = ModelRunner(model)
    _, state = runner.forward(prompts, None, state)
    request = GenerationRequest(prompts.tolist(), tokens, Sampler(1.0, top_p=0.9, seed=3))
    decoder = PinnedDecoder(runner, request, prompts[:, 0], state)
    decoder.grow(limit)
    return decoder

"""Generation with a state equals generation without one, row by row, and text is streamed in whole characters."""

from typing import Any

import numpy as np
import pytest
import torch

from heddle.errors import ConfigError, MachineError
from heddle.generation import generate as generate_module
from heddle.generation.decode import GenerationRequest, NewTokens
from heddle.generation.generate import generate, sample_text
from heddle.laws.harness import encoder_output_for
from heddle.model.decoder import Decoder, build
from heddle.parts.layout import Layout
from heddle.tokenization.tokenizer import Tokenizer
from tests import small
from tests.cases import CASES, case, each_part
from tests.generation.loops import amplify_layers, greedy_loop, is_causal

CAUSAL = [name for name in CASES if is_causal(case(name))]
STEPS = 9
PROMPTS = [[5, 3, 8, 13, 21, 34, 55, 1], [2], [7, 7, 7, 9]]


@pytest.mark.nightly
def test_the_cases_that_continue_texts_are_those_whose_models_do() -> None:
    assert [name for name in CASES if build(case(name), device="meta").causal] == CAUSAL


def build_double(name: str) -> Decoder:
    return build(case(name), dtype=torch.float64, seed=1)


@pytest.mark.parametrize("name", each_part(CAUSAL))
def test_greedy_with_a_state_equals_greedy_without(name: str) -> None:
    model = amplify_layers(build_double(name))
    expected = [greedy_loop(model, prompt, STEPS) for prompt in PROMPTS]
    single_output, batch_output = encoder_output_for(model, 1), encoder_output_for(model, len(PROMPTS))
    assert [
        generate(model, [prompt], encoder_output=single_output, max_new_tokens=STEPS)[0] for prompt in PROMPTS
    ] == expected
    assert generate(model, PROMPTS, encoder_output=batch_output, max_new_tokens=STEPS) == expected


def test_the_texts_above_vary() -> None:
    model = amplify_layers(build_double("attention-gqa"))
    assert len({token for prompt in PROMPTS for token in greedy_loop(model, prompt, STEPS)}) > 6


def test_padding_on_the_wrong_side_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = amplify_layers(build_double("attention-gqa"))
    padded = Layout.padded
    monkeypatch.setattr(Layout, "padded", lambda lengths, length, **_: padded([length] * len(lengths)))
    assert generate(model, PROMPTS, max_new_tokens=STEPS) != [greedy_loop(model, prompt, STEPS) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["attention-gqa", "attention-window-7", "learned"])
def test_sampled_rows_do_not_depend_on_the_others(name: str) -> None:
    model = amplify_layers(build_double(name))
    settings: dict[str, Any] = {"max_new_tokens": STEPS, "temperature": 1.0, "top_p": 0.9, "seed": 5}
    together = generate(model, PROMPTS, **settings)
    assert generate(model, PROMPTS[:1], **settings) == together[:1]
    assert generate(model, [PROMPTS[0], [1, 2, 3], PROMPTS[2]], **settings)[2] == together[2]
    assert generate(model, PROMPTS, **settings) == together
    assert generate(model, PROMPTS, **(settings | {"seed": 6})) != together


@pytest.mark.parametrize("name", ["attention-gqa", "attention-window-7", "rope-mixed", "layers-apart"])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]])
def test_the_cache_is_never_copied(name: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[dict[str, int]] = []
    original = Decoder.forward

    def forward(self: Decoder, *args: Any) -> Any:
        hidden, state = original(self, *args)
        assert state is not None
        addresses.append({name: tensor.data_ptr() for name, tensor in state.tensors().items()})
        return hidden, state

    monkeypatch.setattr(Decoder, "forward", forward)
    generate(build_double(name), prompts, max_new_tokens=STEPS)
    assert len(addresses) == STEPS
    layer_addresses = [
        {name: address for name, address in call.items() if name.startswith("layers.")} for call in addresses
    ]
    assert layer_addresses[0]
    assert all(call == layer_addresses[0] for call in layer_addresses)


def test_the_model_comes_back_as_it_was_and_without_gradients() -> None:
    model = build_double("dropout-everywhere").train()
    assert generate(model, PROMPTS, max_new_tokens=3) == generate(model.eval(), PROMPTS, max_new_tokens=3)
    generate(model.train(), PROMPTS, max_new_tokens=1)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_damaged_weights_are_an_error() -> None:
    model = build_double("attention-gqa")
    with torch.no_grad():
        model.embed.weight[3, 0] = float("nan")
    with pytest.raises(MachineError, match="logits"):
        generate(model, [[3]], max_new_tokens=2)
    assert not model.eval().training


@pytest.mark.parametrize(
    ("prompts", "settings", "says"),
    [
        ([], {}, "prompts:"),
        (None, {}, "prompts:"),
        ({1: 2}, {}, "prompts:"),
        ("text", {}, "prompts:"),
        (["text"], {}, "prompts:"),
        ([1.0, 2.0], {}, "prompts: contain 1.0"),
        ([[1, 2.5]], {}, "prompts: contain 2.5"),
        ([[True]], {}, "prompts:"),
        ([1, [2]], {}, "prompts: contain [2]"),
        ([[1], 2], {}, "prompts: contain 2"),
        ([[[1]]], {}, "prompts: contain [1]"),
        (np.ones((1, 2)), {}, "prompts: contain 1.0"),
        (torch.ones(1, 2), {}, "prompts: a tensor is of torch.float32"),
        (torch.ones(1, 2) > 0, {}, "prompts: a tensor is of torch.bool"),
        (torch.ones(1, 2, 3).long(), {}, "prompts: a tensor has shape [1, 2, 3]"),
        (torch.ones(2, 0).long(), {}, "prompts: a tensor has shape [2"),
        ([torch.ones(2, 2).long()], {}, "prompts: a tensor has shape [2"),
        (torch.tensor([[61]]), {}, "prompts:"),
        ([[1], []], {}, "prompts:"),
        ([[61]], {}, "prompts:"),
        ([[-1]], {}, "prompts: each needs"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens 0:"),
        ([[1]], {"temperature": -1.0}, "temperature -1.0"),
        ([[1]], {"stop": ["x"]}, "stop:"),
        ([[1]], {"on_text": print}, "on_text:"),
        ([[1]], {"on_speculative_round": print}, "on_speculative_round:"),
    ],
)
def test_invalid_prompts_and_settings_are_refused(prompts: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        generate(build_double("attention-mha"), prompts, **settings)
    assert str(caught.value).startswith(says)


def test_new_tokens_have_the_form_of_the_prompts() -> None:
    model = amplify_layers(build_double("attention-gqa"))
    rows = [[5, 3, 8], [2, 7, 1]]
    expected = generate(model, rows, max_new_tokens=STEPS)
    assert generate(model, rows[0], max_new_tokens=STEPS) == expected[0]
    assert generate(model, tuple(map(tuple, rows)), max_new_tokens=STEPS) == expected
    assert generate(model, np.array(rows), max_new_tokens=STEPS) == expected  # type: ignore[call-overload]
    assert generate(model, list(np.array(rows)), max_new_tokens=STEPS) == expected
    assert generate(model, [*map(torch.tensor, rows[0])], max_new_tokens=STEPS) == expected[0]
    for dtype in (torch.int64, torch.int32):
        batch, row = torch.tensor(rows, dtype=dtype), torch.tensor(rows[0], dtype=dtype)
        for actual, tokens in ((generate(model, batch, max_new_tokens=STEPS), expected),
                               (generate(model, row, max_new_tokens=STEPS), expected[0]),
                               (generate(model, row, max_new_tokens=STEPS, num_beams=2),
                                generate(model, rows[0], max_new_tokens=STEPS, num_beams=2))):  # fmt: skip
            assert isinstance(actual, torch.Tensor)
            assert torch.equal(actual, torch.tensor(tokens))
    uneven = generate(model, [*map(torch.tensor, PROMPTS)], max_new_tokens=STEPS)
    assert all(
        torch.equal(a, torch.tensor(b))
        for a, b in zip(uneven, generate(model, PROMPTS, max_new_tokens=STEPS), strict=True)
    )


def test_a_string_gives_a_string(writer: Decoder, tokenizer: Tokenizer) -> None:
    (expected,) = generate(writer, ["The weaver"], tokenizer, max_new_tokens=12)
    assert generate(writer, "The weaver", tokenizer, max_new_tokens=12) == expected
    stopped = generate(writer, "The weaver", tokenizer, max_new_tokens=12, stop=expected[3:5])
    assert stopped == generate(writer, "The weaver", tokenizer, max_new_tokens=12, stop=[expected[3:5]])
    assert len(stopped) < len(expected)
    pieces: list[str] = []
    generate(writer, "", tokenizer, max_new_tokens=12, on_text=lambda row, piece: pieces.append(f"{row}{piece}"))
    assert {piece[0] for piece in pieces} == {"0"}
    with pytest.raises(ConfigError, match="must all be strings"):
        generate(writer, torch.tensor([[1]]), tokenizer)  # type: ignore[call-overload]


def test_learned_positions_end_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match="position"):
        generate(build_double("learned"), [[1]], max_new_tokens=95)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([small.text(4000)], small.VOCABULARY)


@pytest.fixture(scope="module")
def writer(tokenizer: Tokenizer) -> Decoder:
    return amplify_layers(
        build(small.config(small.design(vocab_size=tokenizer.vocab_size)), dtype=torch.float64, seed=2)
    )


def scripted(monkeypatch: pytest.MonkeyPatch, rows: list[list[int]]) -> None:
    """Make generation yield these tokens."""

    def decode(model: Decoder, request: GenerationRequest, finished: list[bool]) -> NewTokens:
        for step in range(min(request.max_new_tokens, max(map(len, rows)))):
            yield [(number, row[min(step, len(row) - 1)]) for number, row in enumerate(rows)]
            if all(finished):
                return

    monkeypatch.setattr(generate_module, "decode", decode)


def test_text_comes_in_whole_characters_and_adds_up(
    writer: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "綜絖 🧵 a é"
    spelled = [next(i for i in range(256 + 1) if tokenizer.token_bytes(i) == bytes([b])) for b in text.encode()]
    scripted(monkeypatch, [[*spelled, tokenizer.eod_id], [*spelled[:2], tokenizer.eod_id]])
    pieces: dict[int, list[str]] = {0: [], 1: []}
    texts = generate(
        writer, ["", "x"], tokenizer, max_new_tokens=99, on_text=lambda row, piece: pieces[row].append(piece)
    )
    assert texts[0] == text
    assert texts[1] == "�"  # a row that ends within a character says so once
    assert pieces[0] == list(text)
    assert ["".join(pieces[row]) for row in (0, 1)] == texts


def test_streaming_adds_up_to_the_result(writer: Decoder, tokenizer: Tokenizer) -> None:
    pieces = ["", ""]

    def hear(row: int, piece: str) -> None:
        pieces[row] += piece

    texts = generate(
        writer, ["The weaver", ""], tokenizer, max_new_tokens=40, temperature=1.0, stop=["e t"], on_text=hear
    )
    assert pieces == texts
    assert generate(writer, ["The weaver"], tokenizer, max_new_tokens=40, temperature=1.0, stop=["e t"]) == texts[:1]


def test_the_end_token_ends_its_row_alone(
    writer: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (tokenizer.encode(text) for text in ("thread", "cloth"))
    scripted(monkeypatch, [[*a, tokenizer.eod_id, *b], [*b, *a, *a, tokenizer.eod_id]])
    assert generate(writer, ["", ""], tokenizer, max_new_tokens=99) == ["thread", "cloththreadthread"]


def test_stop_strings_across_tokens(writer: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [tokenizer.encode("one two three"), tokenizer.encode("tw one thr two ")])
    shown: list[str] = []
    texts = generate(
        writer, ["", ""], tokenizer, max_new_tokens=99, stop=["two"], on_text=lambda row, piece: shown.append(piece)
    )
    assert texts == ["one ", "tw one thr "]
    assert not any("two" in piece for piece in shown)
    with pytest.raises(ConfigError, match="empty stop string"):
        generate(writer, [""], tokenizer, stop=[""])


def test_prompts_open_with_the_end_token_as_in_training(writer: Decoder, tokenizer: Tokenizer) -> None:
    by_tokens = generate(writer, [[tokenizer.eod_id, *tokenizer.encode("The weaver")]], max_new_tokens=12)[0]
    text = generate(writer, ["The weaver"], tokenizer, max_new_tokens=12)[0]
    ended = by_tokens.index(tokenizer.eod_id) if tokenizer.eod_id in by_tokens else len(by_tokens)
    assert text == tokenizer.decode(by_tokens[:ended])
    with pytest.raises(ConfigError, match="must all be strings"):
        generate(writer, [[1, 2]], tokenizer)  # type: ignore[list-item]


def test_a_sample_fits_into_the_context_it_was_trained_on(tokenizer: Tokenizer) -> None:
    data = small.design(vocab_size=tokenizer.vocab_size, embedding={"position": {"kind": "learned", "length": 8}})
    data["layers"][0]["mixer"]["position"] = None
    model = build(small.config(data))
    assert sample_text(model, tokenizer, 8) == sample_text(model, tokenizer, 8)
    with pytest.raises(ConfigError):
        sample_text(model, tokenizer, 9)


def test_a_vocabulary_wider_than_the_tokenizer_writes_only_what_can_be_read(tokenizer: Tokenizer) -> None:
    data = small.design(vocab_size=tokenizer.vocab_size + 5000, head={"tied": False})
    model = build(small.config(data), seed=1)
    texts = generate(model, ["a", ""], tokenizer, max_new_tokens=30, temperature=1.0)
    assert all(len(text) > 5 for text in texts)
    assert max(generate(model, [[1]], max_new_tokens=30, temperature=1.0)[0]) >= tokenizer.vocab_size

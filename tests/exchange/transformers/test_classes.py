"""The classes of transformers: folders there and back bit for bit, starts, losses, what is looked at, vocabularies."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import heddle
import heddle.exchange.transformers as heddle_transformers
from heddle.data.samples import Batch
from heddle.errors import ConfigError
from heddle.exchange.load import load
from heddle.exchange.transformers import HeddleConfig, HeddleForCausalLM, HeddleModel
from heddle.storage.model import model_tensors
from heddle.training.step import accumulate_gradients
from tests.cases import attention, layer
from tests.exchange.transformers.designs import DESIGNS, config, decoder, logits, model, prompts
from tests.small import dropping

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

EACH = pytest.mark.parametrize("name", DESIGNS)
ROWS = torch.tensor(prompts([8, 8]))


def fresh(name: str, **changes: Any) -> HeddleForCausalLM:
    """A new model in float32."""
    return HeddleForCausalLM(HeddleConfig(design=DESIGNS[name] | changes)).eval()


def same(actual: heddle.Decoder, expected: heddle.Decoder) -> None:
    """The same design and the same bits."""
    assert actual.config == expected.config
    actual_tensors, expected_tensors = model_tensors(actual), model_tensors(expected)
    assert list(actual_tensors) == list(expected_tensors)
    for name, tensor in actual_tensors.items():
        assert tensor.dtype == expected_tensors[name].dtype, name
        assert torch.equal(tensor, expected_tensors[name]), name
    assert (actual.head.weight is actual.embed.weight) == (expected.head.weight is expected.embed.weight)


def check_folders(name: str, folder: Path) -> None:
    """What save_pretrained writes, everyone reads; sharded, in its own dtype."""
    hf_model = HeddleForCausalLM.from_decoder(heddle.build(config(name), dtype=torch.bfloat16, seed=5))
    hf_model.save_pretrained(folder, max_shard_size="4KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    same(AutoModelForCausalLM.from_pretrained(folder).heddle_decoder, hf_model.heddle_decoder)
    same(AutoModel.from_pretrained(folder).decoder, hf_model.heddle_decoder)
    same(load(folder).model, hf_model.heddle_decoder)
    wide = HeddleForCausalLM.from_pretrained(folder, dtype=torch.float32)
    same(wide.heddle_decoder, load(folder, dtype=torch.float32).model)
    assert not wide.training
    assert wide.config.to_dict().keys() == hf_model.config.to_dict().keys()


def check_start(name: str, seed: int) -> None:
    """A new model is that of heddle.build with torch's seed."""
    torch.manual_seed(seed)
    same(fresh(name).heddle_decoder, heddle.build(config(name), seed=seed))


@EACH
def test_folders_there_and_back(name: str, tmp_path: Path) -> None:
    check_folders(name, tmp_path)


@pytest.mark.parametrize("name", ["rings", "dual-alibi", "pair"])
def test_what_export_writes_the_auto_classes_read(name: str, tmp_path: Path) -> None:
    match = heddle_transformers.export(decoder(name), tmp_path / "out")
    assert match.family.architecture == "HeddleForCausalLM"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    same(loaded.heddle_decoder, decoder(name))
    assert heddle_transformers.load(tmp_path / "out")[0].config == decoder(name).config
    with torch.no_grad():
        assert torch.equal(loaded(ROWS).logits, logits(name, input_ids=ROWS))


@EACH
def test_a_new_model_is_that_of_heddle(name: str) -> None:
    check_start(name, 7)


def test_what_a_folder_lacks_is_drawn_and_what_it_has_is_kept(tmp_path: Path) -> None:
    hf_model = fresh("window")
    hf_model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    missing = ["model.decoder.layers.1.mixer.q.weight", "model.decoder.head.weight"]
    constant = {name: tensor.fill_(0.5) for name, tensor in tensors.items() if name not in missing}
    save_file(constant, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.manual_seed(11)
    loaded = HeddleForCausalLM.from_pretrained(tmp_path)
    initialized = dict(HeddleForCausalLM.from_decoder(heddle.build(config("window"), seed=11)).named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, initialized[name] if name in missing else torch.full_like(parameter, 0.5)), name


def test_names_that_programs_look_up() -> None:
    assert transformers.HeddleForCausalLM is HeddleForCausalLM
    assert isinstance(AutoModelForCausalLM.from_config(HeddleConfig(design=DESIGNS["gqa"])), HeddleForCausalLM)
    assert isinstance(AutoModel.from_config(HeddleConfig(design=DESIGNS["gqa"])), HeddleModel)


def test_sizes_follow_from_the_design(tmp_path: Path) -> None:
    hf_config = HeddleConfig(design="preset:gqa-tiny", vocab_size=77)
    assert (hf_config.vocab_size, hf_config.hidden_size, hf_config.num_hidden_layers, hf_config.head_dim) == (
        77,
        128,
        6,
        32,
    )
    HeddleForCausalLM(hf_config).save_pretrained(tmp_path)
    hf_config.dtype, hf_config.architectures = torch.float32, ["HeddleForCausalLM"]
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() | {"_name_or_path": ""} == hf_config.to_dict()
    with pytest.raises(ConfigError, match=r"hidden_size:.*64.*128"):
        HeddleConfig(design="preset:gqa-tiny", vocab_size=77, hidden_size=64)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | {"num_hidden_layers": 7}))
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"'num_hidden_layers'.*7"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="design:"):
        HeddleForCausalLM(HeddleConfig())
    with pytest.raises(ConfigError, match="reads an encoder output"):
        HeddleForCausalLM(HeddleConfig(design=CROSS))


CROSS = DESIGNS["gqa"] | {"layers": [{"mixer": {"kind": "cross_attention", "heads": 2, "encoder_width": 8}}]}


def expected_loss(name: str, labels: Tensor) -> Tensor:
    """The mean of −log p of each scored token, one by one."""
    p = logits(name, input_ids=ROWS).float().log_softmax(-1)
    positions = [(b, t) for b in range(2) for t in range(1, 8) if labels[b, t] != -100]
    return torch.stack([-p[b, t - 1, labels[b, t]] for b, t in positions]).mean()


def test_the_loss_is_of_what_is_scored() -> None:
    labels = ROWS.clone()
    labels[0, :3], labels[1, 5] = -100, -100
    hf_model, expected = model("window"), expected_loss("window", labels)
    torch.testing.assert_close(hf_model(ROWS, labels=labels).loss, expected)
    count = int((labels[:, 1:] != -100).sum())
    torch.testing.assert_close(hf_model(ROWS, labels=labels, num_items_in_batch=3 * count).loss, expected / 3)
    assert hf_model(ROWS, labels=labels, return_dict=False)[0] == hf_model(ROWS, labels=labels).loss


def check_experts(calls: int) -> None:
    """Loss and gradients of a mixture of experts are those of heddle's own step, in any number of pieces."""
    built = heddle.build(config("moe"), dtype=torch.float64, seed=2).train()
    tokens = torch.cat((ROWS, ROWS.flip(0)))
    batch = Batch(tokens=tokens.numpy(), doc_lengths=((7,),) * 4, sample_indices=torch.arange(4).numpy())
    result = accumulate_gradients(built, batch, (0, 0))
    expected = {
        name: parameter.grad.clone() for name, parameter in built.named_parameters() if parameter.grad is not None
    }
    built.zero_grad()
    hf_model, total = HeddleForCausalLM.from_decoder(built), 0.0
    for chunk in tokens.chunk(calls):
        outputs = hf_model(
            chunk[:, :-1], shift_labels=chunk[:, 1:].contiguous(), num_items_in_batch=torch.tensor(4 * 7)
        )
        outputs.loss.backward()
        total += outputs.loss.item()
    assert float(result.aux_loss) > 0.01
    assert total == pytest.approx(float(result.loss + result.aux_loss), rel=1e-5)
    for name, grad in expected.items():
        torch.testing.assert_close(built.get_parameter(name).grad, grad, rtol=1e-5, atol=1e-7)
    expert_counts = {path: hf_model.expert_counts[built.get_submodule(path)].tolist() for path in result.router_metrics}  # type: ignore[index]
    assert expert_counts == {path: metrics.expert_counts.tolist() for path, metrics in result.router_metrics.items()}
    updated = heddle.build(config("moe"), dtype=torch.float64, seed=2)
    for path, metrics in result.router_metrics.items():
        updated.get_submodule(path).update_expert_bias(metrics.expert_counts)  # type: ignore[operator]
    hf_model.balance_experts()
    hf_model.balance_experts()  # once a step
    same(built, updated)
    assert not torch.equal(updated.layers[0].feedforward.router.expert_bias, torch.zeros(4))  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("pieces", [1, 2])
def test_what_balances_experts_is_in_the_loss(pieces: int) -> None:
    check_experts(pieces)


def check_checkpointing() -> None:
    """Layers that run again draw the same noise; the next step draws other."""
    hf_model = HeddleForCausalLM(HeddleConfig(design=dropping())).train()
    gradients: list[list[Tensor]] = []
    for recompute in (False, True, True):
        hf_model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions have another name for it besides
            (hf_model.gradient_checkpointing_enable if recompute else hf_model.gradient_checkpointing_disable)()
        assert hf_model.heddle_decoder.checkpointing == recompute
        if len(gradients) < 2:
            torch.manual_seed(3)
        hf_model(ROWS, labels=ROWS).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in hf_model.parameters() if parameter.grad is not None])
    for plain, again in zip(*gradients[:2], strict=True):
        torch.testing.assert_close(again, plain)
    assert not all(torch.equal(a, b) for a, b in zip(*gradients[1:], strict=True))


def test_gradient_checkpointing_changes_nothing() -> None:
    check_checkpointing()


@EACH
def test_hidden_states_and_attention_weights(name: str) -> None:
    hf_model = model(name)
    for cached in (False, True):
        with torch.no_grad():
            outputs = hf_model(ROWS, output_hidden_states=True, output_attentions=True, use_cache=cached)
        weights = heddle.attention_weights(decoder(name), ROWS)
        assert len(outputs.hidden_states) == 1 + len(weights)
        assert torch.equal(hf_model.heddle_decoder.head(outputs.hidden_states[-1]), outputs.logits)
        first = hf_model.get_input_embeddings()(ROWS, heddle.Layout.causal(*ROWS.shape))
        assert torch.equal(outputs.hidden_states[0], first)
        for actual, expected in zip(outputs.attentions, weights, strict=True):
            assert (actual is None) == (expected is None)
            assert actual is None or expected is None or torch.allclose(actual, expected)


def test_embeddings_in_place_of_tokens() -> None:
    rows = model("learned").get_input_embeddings()(ROWS)
    assert torch.equal(logits("learned", inputs_embeds=rows), logits("learned", input_ids=ROWS))
    with pytest.raises(ConfigError, match="either input_ids or inputs_embeds"):
        logits("learned", inputs_embeds=rows, input_ids=ROWS)
    with pytest.raises(ConfigError, match="5 wide"):
        logits("learned", inputs_embeds=rows[..., :5])


def test_only_some_logits() -> None:
    all_logits = logits("gqa", input_ids=ROWS)
    torch.testing.assert_close(logits("gqa", input_ids=ROWS, logits_to_keep=3), all_logits[:, -3:])
    torch.testing.assert_close(
        logits("gqa", input_ids=ROWS, logits_to_keep=torch.tensor([1, 4])), all_logits[:, [1, 4]]
    )


@pytest.mark.parametrize("name", ["gqa", "window"])
def test_vocabularies_grow_and_shrink(name: str, tmp_path: Path) -> None:
    hf_model = fresh(name)
    before = hf_model(ROWS).logits
    hf_model.resize_token_embeddings(70, mean_resizing=False)
    assert torch.equal(hf_model(ROWS).logits[..., :61], before)
    assert (hf_model.config.vocab_size, hf_model.heddle_decoder.config.vocab_size) == (70, 70)
    assert hf_model.heddle_decoder.embed.weight[61:].std() > 0
    hf_model.resize_token_embeddings(pad_to_multiple_of=32)
    assert torch.equal(hf_model(ROWS).logits[..., :61], before)
    mean = hf_model.heddle_decoder.embed.weight[:70].double().mean(0).float()
    assert torch.equal(hf_model.heddle_decoder.embed.weight[70:], mean.expand(26, -1))
    hf_model.save_pretrained(tmp_path)
    same(HeddleForCausalLM.from_pretrained(tmp_path).heddle_decoder, hf_model.heddle_decoder)
    hf_model.resize_token_embeddings(61)
    assert hf_model.heddle_decoder.embed.weight.shape[0] == 61
    torch.testing.assert_close(hf_model(ROWS).logits, before)
    assert hf_model.generate(ROWS, max_new_tokens=2, do_sample=False).shape == (2, 10)


def test_value_embeddings_grow_with_the_vocabulary() -> None:
    """Also those of a layer that is visited again."""
    own, shared = (layer(attention(value_embedding=each)) for each in ({}, {"shared": True}))
    hf_model = fresh("gqa", layers=[{"repeat": 2, "shared": True, "layers": [own]}, shared])
    before = hf_model(ROWS).logits
    hf_model.resize_token_embeddings(70, mean_resizing=False)
    torch.testing.assert_close(hf_model(ROWS).logits[..., :61], before)
    names = [f"layers.{index}.mixer.value_embedding.weight" for index in (0, 1)]
    tables = [hf_model.heddle_decoder.get_parameter(name) for name in names]
    assert tables[0] is tables[1]
    assert tables[0].shape == (70, 24)
    assert bool(hf_model(torch.tensor([[69, 3]])).logits.isfinite().all())


def test_what_would_be_ignored_is_refused() -> None:
    assert torch.equal(
        logits("gqa", input_ids=ROWS, token_type_ids=torch.zeros_like(ROWS)), logits("gqa", input_ids=ROWS)
    )
    for name in ("token_type_ids", "head_mask", "attention_maks"):
        with pytest.raises(ConfigError, match=f"{name}:"):
            logits("gqa", input_ids=ROWS, **{name: torch.ones_like(ROWS)})


def test_encoders_see_both_ways() -> None:
    bidirectional = DESIGNS["gqa"] | {"layers": [{"mixer": {"kind": "attention", "heads": 4, "causal": False}}]}
    hf_model = HeddleForCausalLM(HeddleConfig(design=bidirectional)).eval()
    with torch.no_grad():
        outputs = hf_model(ROWS)
        assert outputs.past_key_values is None
        assert torch.equal(outputs.logits, hf_model.heddle_decoder.head(hf_model.heddle_decoder(ROWS)[0]))
        with pytest.raises(ConfigError, match="sees later tokens"):
            hf_model(ROWS, attention_mask=torch.ones(2, 1, 8, 8).bool())

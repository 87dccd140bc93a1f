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
import heddle.exchange.transformers as ours
from heddle.data.samples import Batch
from heddle.errors import ConfigError
from heddle.exchange.load import load
from heddle.exchange.transformers import HeddleConfig, HeddleForCausalLM, HeddleModel
from heddle.storage.model import model_tensors
from heddle.training.step import gradients
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


def same(one: heddle.Decoder, other: heddle.Decoder) -> None:
    """The same design and the same bits."""
    assert one.config == other.config
    mine, theirs = model_tensors(one), model_tensors(other)
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
    assert (one.head.weight is one.embed.weight) == (other.head.weight is other.embed.weight)


def check_folders(name: str, folder: Path) -> None:
    """What save_pretrained writes, everyone reads; sharded, in its own dtype."""
    one = HeddleForCausalLM.of(heddle.build(config(name), dtype=torch.bfloat16, seed=5))
    one.save_pretrained(folder, max_shard_size="4KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    same(AutoModelForCausalLM.from_pretrained(folder).of_heddle, one.of_heddle)
    same(AutoModel.from_pretrained(folder).decoder, one.of_heddle)
    same(load(folder).model, one.of_heddle)
    wide = HeddleForCausalLM.from_pretrained(folder, dtype=torch.float32)
    same(wide.of_heddle, load(folder, dtype=torch.float32).model)
    assert not wide.training
    assert wide.config.to_dict().keys() == one.config.to_dict().keys()


def check_start(name: str, seed: int) -> None:
    """A new model is that of heddle.build with torch's seed."""
    torch.manual_seed(seed)
    same(fresh(name).of_heddle, heddle.build(config(name), seed=seed))


@EACH
def test_folders_there_and_back(name: str, tmp_path: Path) -> None:
    check_folders(name, tmp_path)


@pytest.mark.parametrize("name", ["rings", "dual-alibi", "pair"])
def test_what_export_writes_the_auto_classes_read(name: str, tmp_path: Path) -> None:
    found = ours.export(decoder(name), tmp_path / "out")
    assert found.family.architecture == "HeddleForCausalLM"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    same(again.of_heddle, decoder(name))
    assert ours.load(tmp_path / "out")[0].config == decoder(name).config
    with torch.no_grad():
        assert torch.equal(again(ROWS).logits, logits(name, input_ids=ROWS))


@EACH
def test_a_new_model_is_that_of_heddle(name: str) -> None:
    check_start(name, 7)


def test_what_a_folder_lacks_is_drawn_and_what_it_has_is_kept(tmp_path: Path) -> None:
    one = fresh("window")
    one.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    lost = ["model.decoder.layers.1.mixer.q.weight", "model.decoder.head.weight"]
    marked = {name: tensor.fill_(0.5) for name, tensor in held.items() if name not in lost}
    save_file(marked, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.manual_seed(11)
    again = HeddleForCausalLM.from_pretrained(tmp_path)
    built = dict(HeddleForCausalLM.of(heddle.build(config("window"), seed=11)).named_parameters())
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, built[name] if name in lost else torch.full_like(parameter, 0.5)), name


def test_names_that_programs_look_up() -> None:
    assert transformers.HeddleForCausalLM is HeddleForCausalLM
    assert isinstance(AutoModelForCausalLM.from_config(HeddleConfig(design=DESIGNS["gqa"])), HeddleForCausalLM)
    assert isinstance(AutoModel.from_config(HeddleConfig(design=DESIGNS["gqa"])), HeddleModel)


def test_sizes_follow_from_the_design(tmp_path: Path) -> None:
    one = HeddleConfig(design="preset:gqa-tiny", vocab_size=77)
    assert (one.vocab_size, one.hidden_size, one.num_hidden_layers, one.head_dim) == (77, 128, 6, 32)
    HeddleForCausalLM(one).save_pretrained(tmp_path)
    one.dtype, one.architectures = torch.float32, ["HeddleForCausalLM"]
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.to_dict() | {"_name_or_path": ""} == one.to_dict()
    with pytest.raises(ConfigError, match="hidden_size: is 64, but the design says 128"):
        HeddleConfig(design="preset:gqa-tiny", vocab_size=77, hidden_size=64)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | {"num_hidden_layers": 7}))
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'num_hidden_layers' is 7"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="design: is missing"):
        HeddleForCausalLM(HeddleConfig())
    with pytest.raises(ConfigError, match="reads a memory"):
        HeddleForCausalLM(HeddleConfig(design=CROSS))


CROSS = DESIGNS["gqa"] | {"layers": [{"mixer": {"kind": "cross_attention", "heads": 2, "memory_width": 8}}]}


def expected_loss(name: str, labels: Tensor) -> Tensor:
    """The mean of −log p of each scored token, one by one."""
    p = logits(name, input_ids=ROWS).float().log_softmax(-1)
    places = [(b, t) for b in range(2) for t in range(1, 8) if labels[b, t] != -100]
    return torch.stack([-p[b, t - 1, labels[b, t]] for b, t in places]).mean()


def test_the_loss_is_of_what_is_scored() -> None:
    labels = ROWS.clone()
    labels[0, :3], labels[1, 5] = -100, -100
    one, want = model("window"), expected_loss("window", labels)
    torch.testing.assert_close(one(ROWS, labels=labels).loss, want)
    count = int((labels[:, 1:] != -100).sum())
    torch.testing.assert_close(one(ROWS, labels=labels, num_items_in_batch=3 * count).loss, want / 3)
    assert one(ROWS, labels=labels, return_dict=False)[0] == one(ROWS, labels=labels).loss


def check_experts(pieces: int) -> None:
    """Loss and gradients of a mixture of experts are those of heddle's own step, in any number of pieces."""
    built = heddle.build(config("moe"), dtype=torch.float64, seed=2).train()
    tokens = torch.cat((ROWS, ROWS.flip(0)))
    batch = Batch(tokens=tokens.numpy(), lengths=((7,),) * 4, samples=torch.arange(4).numpy())
    told = gradients(built, batch, (0, 0))
    want = {name: parameter.grad.clone() for name, parameter in built.named_parameters() if parameter.grad is not None}
    built.zero_grad()
    one, total = HeddleForCausalLM.of(built), 0.0
    for part in tokens.chunk(pieces):
        found = one(part[:, :-1], shift_labels=part[:, 1:].contiguous(), num_items_in_batch=torch.tensor(4 * 7))
        found.loss.backward()
        total += found.loss.item()
    assert float(told.penalty) > 0.01
    assert total == pytest.approx(float(told.loss + told.penalty), rel=1e-5)
    for name, grad in want.items():
        torch.testing.assert_close(built.get_parameter(name).grad, grad, rtol=1e-5, atol=1e-7)
    loads = {path: one.loads[built.get_submodule(path)].tolist() for path in told.mixtures}  # type: ignore[index]
    assert loads == {path: tally.loads.tolist() for path, tally in told.mixtures.items()}
    other = heddle.build(config("moe"), dtype=torch.float64, seed=2)
    for path, tally in told.mixtures.items():
        other.get_submodule(path).balance(tally.loads)  # type: ignore[operator]
    one.balance_experts()
    one.balance_experts()  # once a step
    same(built, other)
    assert not torch.equal(other.layers[0].feedforward.router.balance, torch.zeros(4))  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("pieces", [1, 2])
def test_what_balances_experts_is_in_the_loss(pieces: int) -> None:
    check_experts(pieces)


def check_checkpointing() -> None:
    """Layers that run again draw the same noise; the next step draws other."""
    one = HeddleForCausalLM(HeddleConfig(design=dropping())).train()
    found: list[list[Tensor]] = []
    for recompute in (False, True, True):
        one.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions have another name for it besides
            (one.gradient_checkpointing_enable if recompute else one.gradient_checkpointing_disable)()
        assert one.of_heddle.checkpointing == recompute
        if len(found) < 2:
            torch.manual_seed(3)
        one(ROWS, labels=ROWS).loss.backward()
        found.append([parameter.grad.clone() for parameter in one.parameters() if parameter.grad is not None])
    for plain, again in zip(*found[:2], strict=True):
        torch.testing.assert_close(again, plain)
    assert not all(torch.equal(a, b) for a, b in zip(*found[1:], strict=True))


def test_gradient_checkpointing_changes_nothing() -> None:
    check_checkpointing()


@EACH
def test_hidden_states_and_attention_weights(name: str) -> None:
    one = model(name)
    for cached in (False, True):
        with torch.no_grad():
            found = one(ROWS, output_hidden_states=True, output_attentions=True, use_cache=cached)
        weights = heddle.attention_weights(decoder(name), ROWS)
        assert len(found.hidden_states) == 1 + len(weights)
        assert torch.equal(one.of_heddle.head(found.hidden_states[-1]), found.logits)
        first = one.get_input_embeddings()(ROWS, heddle.Layout.causal(*ROWS.shape))
        assert torch.equal(found.hidden_states[0], first)
        for mine, want in zip(found.attentions, weights, strict=True):
            assert (mine is None) == (want is None)
            assert mine is None or want is None or torch.allclose(mine, want)


def test_embeddings_in_place_of_tokens() -> None:
    rows = model("learned").get_input_embeddings()(ROWS)
    assert torch.equal(logits("learned", inputs_embeds=rows), logits("learned", input_ids=ROWS))
    with pytest.raises(ConfigError, match="one of the two"):
        logits("learned", inputs_embeds=rows, input_ids=ROWS)
    with pytest.raises(ConfigError, match="are vectors 5 wide"):
        logits("learned", inputs_embeds=rows[..., :5])


def test_only_some_logits() -> None:
    whole = logits("gqa", input_ids=ROWS)
    torch.testing.assert_close(logits("gqa", input_ids=ROWS, logits_to_keep=3), whole[:, -3:])
    torch.testing.assert_close(logits("gqa", input_ids=ROWS, logits_to_keep=torch.tensor([1, 4])), whole[:, [1, 4]])


@pytest.mark.parametrize("name", ["gqa", "window"])
def test_vocabularies_grow_and_shrink(name: str, tmp_path: Path) -> None:
    one = fresh(name)
    before = one(ROWS).logits
    one.resize_token_embeddings(70, mean_resizing=False)
    assert torch.equal(one(ROWS).logits[..., :61], before)
    assert (one.config.vocab_size, one.of_heddle.config.vocab_size) == (70, 70)
    assert one.of_heddle.embed.weight[61:].std() > 0
    one.resize_token_embeddings(pad_to_multiple_of=32)
    assert torch.equal(one(ROWS).logits[..., :61], before)
    mean = one.of_heddle.embed.weight[:70].double().mean(0).float()
    assert torch.equal(one.of_heddle.embed.weight[70:], mean.expand(26, -1))
    one.save_pretrained(tmp_path)
    same(HeddleForCausalLM.from_pretrained(tmp_path).of_heddle, one.of_heddle)
    one.resize_token_embeddings(61)
    assert one.of_heddle.embed.weight.shape[0] == 61
    torch.testing.assert_close(one(ROWS).logits, before)
    assert one.generate(ROWS, max_new_tokens=2, do_sample=False).shape == (2, 10)


def test_what_would_be_ignored_is_refused() -> None:
    assert torch.equal(
        logits("gqa", input_ids=ROWS, token_type_ids=torch.zeros_like(ROWS)), logits("gqa", input_ids=ROWS)
    )
    for name in ("token_type_ids", "head_mask", "attention_maks"):
        with pytest.raises(ConfigError, match=f"{name}: is not read"):
            logits("gqa", input_ids=ROWS, **{name: torch.ones_like(ROWS)})


def test_encoders_see_both_ways() -> None:
    both = DESIGNS["gqa"] | {"layers": [{"mixer": {"kind": "attention", "heads": 4, "causal": False}}]}
    one = HeddleForCausalLM(HeddleConfig(design=both)).eval()
    with torch.no_grad():
        found = one(ROWS)
        assert found.past_key_values is None
        assert torch.equal(found.logits, one.of_heddle.head(one.of_heddle(ROWS)[0]))
        with pytest.raises(ConfigError, match="sees later tokens"):
            one(ROWS, attention_mask=torch.ones(2, 1, 8, 8).bool())

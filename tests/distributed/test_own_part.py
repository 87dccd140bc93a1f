"""A mixer is shardable as it is written: the part of docs/add-a-part.md, which nothing else in the package knows."""

from pathlib import Path

from heddle.config import load_part
from heddle.model.load_config import load_config
from tests.distributed.steps import MESHES, WAYS, largest_difference, on_mesh, on_one_process
from tests.docs.pages import blocks


def test_a_part_of_ones_own_is_shardable(tmp_path: Path) -> None:
    texts = {block.file: block.text for block in blocks("add-a-part.md")}
    part = tmp_path / "ema_on_ranks.py"  # another kind than that of other tests
    part.write_text(texts["ema.py"], encoding="utf-8")
    load_part(part)
    design = tmp_path / "design.yaml"
    design.write_text(texts["ema.yaml"].replace("kind: ema", f"kind: {part.stem}"), encoding="utf-8")
    config = load_config(str(design), ["vocab_size=61"])
    for mesh, way in [("FSDP-2", "everything"), ("HSDP-2×2", "recomputed")]:
        expected = on_one_process(config, WAYS[way])
        for actual in on_mesh(config, WAYS[way], MESHES[mesh]):
            assert largest_difference(expected, actual) < 1e-10

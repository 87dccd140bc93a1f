"""How many files one override, and one generated token, pass through (tools/files_entered.py)."""

import heddle.model.load_config
from tools import files_entered


def test_an_override_is_followed_through_at_most_ten_files() -> None:
    files = files_entered.override_files(heddle.model.load_config._try_build)
    assert files[0] == "cli/main.py"
    assert {"lab/show.py", "model/load_config.py", "parts/mixers/attention.py"} <= set(files)
    assert len(files) <= 10, files


def test_a_decoded_token_passes_through_at_most_six_files_outside_the_layers() -> None:
    files = files_entered.decode_files()
    assert {"generation/decode.py", "parts/mixers/attention.py", "numerics/linear.py"} <= set(files)
    outside = files_entered.outside_layers(files)
    assert "model/decoder.py" in outside
    assert len(outside) <= 6, outside


def test_segment_ids_are_read_by_few_files() -> None:
    holders, readers = files_entered.segment_id_files()
    assert "training/step.py" in holders
    assert "parts/layout.py" in readers
    assert set(readers) <= set(holders)

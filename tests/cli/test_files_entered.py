"""Which files one override, and one generated token, pass through (tools/files_entered.py); the counts are reviewed."""

import heddle.model.load_config
from tools import files_entered


def test_an_override_is_followed_to_the_config() -> None:
    files = files_entered.override_files(heddle.model.load_config._try_build)
    assert files[0] == "cli/main.py"
    assert {"lab/show.py", "model/load_config.py", "parts/mixers/attention.py"} <= set(files)


def test_a_decoded_token_is_followed() -> None:
    files = files_entered.decode_files()
    assert {"generation/decode.py", "parts/mixers/attention.py", "numerics/linear.py"} <= set(files)
    assert "model/decoder.py" in files_entered.outside_layers(files)


def test_segment_ids_are_followed() -> None:
    holders, readers = files_entered.segment_id_files()
    assert "training/step.py" in holders
    assert "parts/layout.py" in readers
    assert set(readers) <= set(holders)

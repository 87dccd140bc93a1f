"""Files of options: YAML, or the record of a run."""

from pathlib import Path
from typing import Any

from heddle.errors import ConfigError
from heddle.model.load_config import parse_yaml
from heddle.storage.file_io import read_json_file
from heddle.storage.run_log import RUN_FILE

OPTIONS = "options"  # of run.json


def read_options(path: Path | str) -> dict[str, Any]:
    """Return options by name, from a YAML file or a run's folder. Raises ConfigError or CheckpointError."""
    path = Path(path)
    if path.is_dir():
        options = read_json_file(path / RUN_FILE).get(OPTIONS)
        if not isinstance(options, dict):
            raise ConfigError(f"{path}: its {RUN_FILE} holds no options; write them to a YAML file")
        return options
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigError(f"{path}: cannot be read ({reason}); name a YAML file of options") from error
    options = parse_yaml(text, str(path))
    if not isinstance(options, dict):
        raise ConfigError(f"{path}: is not a table of options; write lines such as steps: 200")
    return {str(name).rstrip("_"): value for name, value in options.items()}

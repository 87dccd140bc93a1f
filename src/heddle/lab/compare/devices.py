"""Where the runs of a comparison take place: how many at a time, on which devices, shared among which processes."""

import re
from collections.abc import Mapping

from heddle.errors import ConfigError

MAX_WORKERS = 64


def choose_devices(devices: str | None, device: str, workers: int | None, processes: int) -> tuple[str, ...]:
    """The devices of --devices, or the GPUs that --nproc needs without them; () where one device is enough.

    Raises ConfigError for numbers of devices, --workers and --nproc that do not fit each other.
    """
    from heddle.runtime import device_name

    check_workers(workers, devices)
    if not 1 <= processes <= MAX_WORKERS:
        raise ConfigError(f"--nproc {processes}: must be from 1 to {MAX_WORKERS}")
    names = parse_devices(devices, device)
    if processes == 1:
        return names
    if len(names) % processes:
        raise ConfigError(f"--nproc {processes}: does not divide the {len(names)} of --devices {devices}")
    name = names[0] if names else device_name(device)
    if name == "mps" or (not names and ":" in name):
        raise ConfigError(f"--device {name}: {processes} processes have a device each; give cuda or cpu")
    if name != "cuda":
        return names
    if workers is not None:
        raise ConfigError(f"--workers {workers}: GPUs of runs of {processes} processes are named; give --devices")
    return parse_devices(f"0-{processes - 1}", "auto")


def check_workers(workers: int | None, devices: str | None) -> None:
    """Raise ConfigError for a number of workers that is no number of processes, or that --devices gives already."""
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise ConfigError(f"--workers {workers}: must be from 1 to {MAX_WORKERS}")
    if workers is not None and devices is not None:
        raise ConfigError(f"--workers {workers}: --devices {devices} says how many runs there are; leave one out")


def parse_devices(text: str | None, device: str) -> tuple[str, ...]:
    """Parse `0-7`, `cuda:0,cuda:2` or `cpu:4` (four runs at a time) into names; () for None. device: --device.

    Raises ConfigError for a device that this machine lacks or that is named twice.
    """
    from heddle.runtime import kind_of_device, resolve_device

    if text is None:
        return ()
    if device != "auto":
        raise ConfigError(f"--devices {text}: names the devices already; leave --device {device} out")
    names: list[str] = []
    for term in text.split(","):
        matched = re.fullmatch(r"(?:cuda:)?(\d{1,4})(?:-(\d{1,4}))?|cpu:(\d{1,4})|(cpu|cuda|mps)", term.strip())
        if matched is None:
            raise ConfigError(f"--devices {text}: expected GPUs, such as 0-7 or cuda:0,cuda:2, or cpu:4")
        first, last, count, kind = matched.groups()
        if first is not None:
            names += [resolve_device(f"cuda:{index}") for index in range(int(first), int(last or first) + 1)]
        else:
            names += [resolve_device(kind or "cpu")] * int(count or 1)
        if len(names) > MAX_WORKERS:
            raise ConfigError(f"--devices {text}: are more than {MAX_WORKERS}")
    twice = [name for name in names if names.count(name) > 1 and name != "cpu"]
    if not names or twice or len(set(map(kind_of_device, names))) > 1:
        reason = f"names {twice[0]} twice" if twice else "must be at least one device, and all of one kind"
        raise ConfigError(f"--devices {text}: {reason}")
    return tuple(names)


def parse_process_share(text: str | None, environment: Mapping[str, str]) -> tuple[int, int] | None:
    """(index, count) of `--share 0/8`, or of this job in an array of Slurm's; None where there is neither."""
    if text is None and "SLURM_ARRAY_TASK_ID" not in environment:
        return None
    source = "--share" if text is not None else "SLURM_ARRAY_TASK_ID"
    if text is None:
        numbers = [environment.get(f"SLURM_ARRAY_TASK_{name}", "") for name in ("ID", "COUNT", "MIN")]
        text = "/".join(numbers[:2])
    else:
        numbers = [*text.split("/"), "0"]
    if len(numbers) != 3 or not all(re.fullmatch(r"\d{1,9}", number) for number in numbers) or not int(numbers[1]):
        raise ConfigError(f"{source} {text}: expected the number of this process and of all of them, such as 0/8")
    index, count, first = map(int, numbers)
    if source == "--share" and index >= count:
        raise ConfigError(f"--share {text}: must be from 0/{count} to {count - 1}/{count}")
    return (index - first) % count, count

"""Which form of an operation runs: the first that has no reason against it, or the one that was named."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor
from torch.compiler import is_compiling

from heddle.errors import ConfigError

Facts = TypeVar("Facts")

_forced: ContextVar[Mapping[str, str] | None] = ContextVar("forced", default=None)
_witness: ContextVar[list["Choice"] | None] = ContextVar("witness", default=None)
_device: ContextVar[str | None] = ContextVar("device", default=None)


def device_of(tensor: Tensor) -> str:
    """The type of a tensor's device, or the one in whose name a meta tensor stands."""
    return (None if is_compiling() else _device.get()) or tensor.device.type


@dataclass(frozen=True)
class Form(Generic[Facts]):
    """One way to compute an operation. `refuse(facts)` says why it cannot serve, or None."""

    name: str
    run: Callable[..., Any]
    refuse: Callable[[Facts], str | None]


class Choice(NamedTuple):
    """What was chosen for one call, and the reasons against the forms before it."""

    operation: str
    form: str
    against: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Operation(Generic[Facts]):
    """An operation and its forms, best first; the last, the reference, serves always."""

    name: str
    forms: tuple[Form[Facts], ...]

    def choose(self, facts: Facts) -> Form[Facts]:
        """Pick by facts alone (shapes, dtypes, layout): no value is ever read from a device.

        Raises ConfigError if a form was forced that cannot serve, with that form's reason.
        """
        if is_compiling():  # what is traced cannot see what is in force around a call
            return self.first(facts)
        forced = (_forced.get() or {}).get(self.name)
        against: list[tuple[str, str]] = []
        for form in self.forms:
            if forced is not None and form.name != forced:
                continue
            reason = form.refuse(facts)
            if reason is None:
                witness = _witness.get()
                if witness is not None:
                    witness.append(Choice(self.name, form.name, tuple(against)))
                return form
            if forced is not None:
                raise ConfigError(f"kernel {self.name}={forced}: cannot serve here, because {reason}")
            against.append((form.name, reason))
        raise AssertionError(f"no form of {self.name} serves {facts}")

    def takes(self, name: str, facts: Facts) -> bool:
        """Whether a call with these facts may run, and would not be kept from, the form of this name."""
        forced = None if is_compiling() else (_forced.get() or {}).get(self.name)
        (form,) = (form for form in self.forms if form.name == name)
        return forced in (None, name) and form.refuse(facts) is None

    def first(self, facts: Facts) -> Form[Facts]:
        """The first form without a reason against it, whatever was named: for the pieces of another form."""
        return next(form for form in self.forms if form.refuse(facts) is None)


@contextmanager
def forcing(choices: Mapping[str, str], operations: Mapping[str, Operation[Any]]) -> Iterator[None]:
    """Within the block, the named operations use the named forms."""
    for name, form in choices.items():
        if name not in operations:
            raise ConfigError(_unknown("kernel", name, sorted(operations)))
        forms = [candidate.name for candidate in operations[name].forms]
        if form not in forms:
            raise ConfigError(_unknown(f"kernel {name}", form, forms))
    token = _forced.set({**(_forced.get() or {}), **choices})
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def witnessing(device: str) -> Iterator[list[Choice]]:
    """Collect every choice made within the block, by meta tensors that stand for tensors on `device`."""
    seen: list[Choice] = []
    token, place = _witness.set(seen), _device.set(device)
    try:
        yield seen
    finally:
        _witness.reset(token)
        _device.reset(place)


def _unknown(what: str, value: str, choices: list[str]) -> str:
    near = get_close_matches(value, choices, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ";"
    return f"{what}: unknown form '{value}'{hint} choices: {', '.join(choices)}"

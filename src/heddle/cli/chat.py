"""`heddle chat`: chat with a trained model, or let it continue a text, in the terminal or on a page."""

import contextlib
import math
import signal
import sys
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from heddle.cli.serve import check_installed, load_causal
from heddle.errors import ConfigError, DataError
from heddle.progress import print_status, print_text, print_warning
from heddle.serving.limits import ChatSettings
from heddle.session import GENERATION_NEEDS, dtype_of, open_session
from heddle.signals import Interrupted

if TYPE_CHECKING:
    from heddle.serving.conversation import Conversation, Reply, SamplingSettings
    from heddle.serving.engine import Engine
    from heddle.serving.requests import RequestReader

MAX_MODELS = 2
LINE = 100  # characters
COMMANDS = """\
/temperature X   0 is greedy
/top-k N         sample from the N most likely tokens; 0: from all of them
/top-p X         sample from the most likely tokens up to this total probability
/max-tokens N    max tokens per answer
/seed N          reproducible answers; /seed alone: random
/stop TEXT       end an answer before TEXT; /stop alone: no stop string
/tokens          the last answer's tokens with their probabilities; /tokens all: with the likeliest alternatives
/state           bytes of the state at the current length and beyond
/undo            remove the last answer and its prompt
/reset           start over
/quit            quit, like Ctrl-D; Ctrl-C stops an answer
To send text that begins with /, begin with // instead."""
# The commands that set a field of `SamplingSettings`, and how each reads its value.
SETTINGS: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top-k": int,
    "top-p": float,
    "max-tokens": int,
    "seed": lambda value: int(value) if value else None,
    "stop": lambda value: (value,) if value else (),
}


def chat(settings: ChatSettings) -> None:
    """Chat with a model, or let it continue a text; two models answer side by side.

    A model with a chat template answers messages; any other continues the text. /help lists the commands.
    """
    models = settings.models
    if len(models) > MAX_MODELS:
        raise ConfigError(f"{models[MAX_MODELS]}: at most two models can answer; leave the others out")
    if not settings.page and (settings.open or settings.port):
        raise ConfigError(f"{'--open' if settings.open else '--port'}: needs a page; give --page, too")
    if settings.page:
        check_installed()
    with ExitStack() as stack:
        runtime = open_session(stack, settings, kernels=settings.kernel)
        from heddle.machine import with_measured_choices
        from heddle.serving.engine import Engine
        from heddle.serving.limits import ServerLimits
        from heddle.serving.requests import RequestReader

        limits, pairs = ServerLimits(max_seconds=3600), []
        names = [folder.resolve().name for folder in models]
        loaded = [load_causal(folder, dtype_of(settings.precision), runtime.device) for folder in models]
        with_measured_choices(runtime, settings.threads, GENERATION_NEEDS)
        for folder, name, (decoder, tokenizer) in zip(models, names, loaded, strict=True):
            reader = RequestReader(tokenizer, str(folder) if names.count(name) > 1 else name, limits)
            pairs.append((stack.enter_context(Engine(decoder, tokenizer, limits)), reader))
        if settings.page:
            _serve_page(pairs, settings.port, settings.open)
        else:
            from heddle.serving.conversation import Conversation, SamplingSettings

            Terminal([Conversation(*pair) for pair in pairs], SamplingSettings()).run()


def _serve_page(pairs: "list[tuple[Engine, RequestReader]]", port: int, open_page: bool) -> None:
    import webbrowser

    from heddle.cli.serve import page_of
    from heddle.serving.app import Access, Application
    from heddle.serving.chat_page import add_chat_page
    from heddle.serving.server import host_names, listen, run_server

    with listen("127.0.0.1", port) as listener:
        used_port = listener.getsockname()[1]
        access = Access(host_names("127.0.0.1", used_port))
        first, *others = (Application(engine, reader, access) for engine, reader in pairs)
        add_chat_page(first, page_of(pairs), others)
        address = f"http://127.0.0.1:{used_port}/"
        print_text(address)
        print_status("chat: Ctrl-C ends the page")
        if open_page:
            webbrowser.open(address)
        run_server(first, listener)


class Terminal:
    """Reads lines, answers them, and follows commands."""

    def __init__(self, conversations: "list[Conversation]", settings: "SamplingSettings") -> None:
        self.conversations, self.settings = conversations, settings

    def run(self) -> None:
        """Answer lines until the end of the input or /quit."""
        names = " and ".join(conversation.reader.name for conversation in self.conversations)
        does = "answers messages" if self.conversations[0].is_chat else "continues your text"
        print_status(f"chat: {names} {does}; /help lists the commands")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() a history and editing

        while (line := _read_line()) is not None:
            if line.startswith("/") and not line.startswith("//"):
                name, _, value = line[1:].partition(" ")
                if name in ("quit", "exit"):
                    return
                self.command(name, value.strip())
            else:
                self.answer(line.removeprefix("/") if line.startswith("//") else line)

    def answer(self, text: str) -> None:
        """Let every model answer; Ctrl-C ends the answer that is being written."""
        from heddle.serving.requests import RequestError

        for conversation in self.conversations:
            if len(self.conversations) > 1:
                print_text(f"--- {conversation.reader.name}")
            try:
                conversation.answer(text, self.settings, lambda piece: print_text(piece, end=""))
                print_text("")
            except RequestError as error:
                print_text("")
                print_warning(str(error))
            except Interrupted as interrupted:
                if interrupted.exit_code != 128 + signal.SIGINT:
                    raise
                print_text("")
                print_status("chat: the answer was stopped and discarded; Ctrl-D ends the chat")

    def command(self, name: str, value: str) -> None:
        """Run a command such as /help, without its slash."""
        if name == "help":
            print_text(f"{COMMANDS}\nnow: {self._shown_settings()}")
        elif name in SETTINGS:
            self._set(name, value)
        elif name == "undo":
            is_undone = [conversation.undo() for conversation in self.conversations]
            print_status("chat: the last answer was removed" if any(is_undone) else "chat: there is no answer yet")
        elif name == "reset":
            for conversation in self.conversations:
                while conversation.undo():
                    pass
            print_status("chat: the conversation was cleared")
        elif name in ("tokens", "state"):
            for conversation in self.conversations:
                _print_tokens(conversation, value == "all") if name == "tokens" else _print_state(conversation)
        else:
            print_warning(f"/{name}: is not a command; /help lists them")

    def _set(self, name: str, value: str) -> None:
        """Change a setting if every model accepts it."""
        from heddle.serving.requests import RequestError

        try:
            changed = replace(self.settings, **{name.replace("-", "_"): SETTINGS[name](value)})
            for conversation in self.conversations:
                conversation.check(changed)
        except ValueError:
            print_warning(f"/{name} {value}: must be a number")
        except RequestError as error:
            print_warning(f"/{name} {value}: {error}")
        else:
            self.settings = changed
            print_status(f"chat: {self._shown_settings()}")

    def _shown_settings(self) -> str:
        seed = "none" if self.settings.seed is None else self.settings.seed
        stop = repr(self.settings.stop[0]) if self.settings.stop else "none"
        return (
            f"temperature {self.settings.temperature:g}, top-k {self.settings.top_k}, top-p {self.settings.top_p:g}, "
            f"max-tokens {self.settings.max_tokens}, seed {seed}, stop {stop}"
        )


def _read_line() -> str | None:
    """The next line; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")
    except EOFError:
        return None
    except UnicodeDecodeError:
        raise DataError("standard input: is not UTF-8 text") from None


def _last_reply(conversation: "Conversation") -> "Reply | None":
    if conversation.last_reply is None:
        print_status(f"chat: {conversation.reader.name} has not answered yet")
    return conversation.last_reply


def _print_tokens(conversation: "Conversation", with_alternatives: bool) -> None:
    reply, tokenizer = _last_reply(conversation), conversation.reader.tokenizer
    if reply is None:
        return
    if not reply.scores:
        print_status("chat: this device decodes with recorded graphs, which return no probabilities")
    if not with_alternatives:
        shown = [
            f"{tokenizer.decode([score.token])!r} {math.exp(score.log_probability):.0%}".replace(" ", "\xa0")
            for score in reply.scores
        ]
        for line in textwrap.wrap("  ".join(shown), LINE, break_long_words=False, break_on_hyphens=False):
            print_text(line.replace("\xa0", " "))
        return
    for score in reply.scores:
        others = ", ".join(
            f"{tokenizer.decode([token])!r} {math.exp(value):.1%}" for token, value in score.alternatives
        )
        print_text(f"{math.exp(score.log_probability):7.1%}  {tokenizer.decode([score.token])!r:16}  among {others}")


def _print_state(conversation: "Conversation") -> None:
    from heddle.progress import format_amount
    from heddle.serving.chat_page import ModelView

    reply = conversation.last_reply
    lengths = [*([reply.tokens] if reply else []), 512, 4096, 32768]
    sizes = ModelView(conversation.engine.model).state_bytes(lengths)
    pairs = zip(lengths, sizes, strict=True)
    amounts = ", ".join(f"{format_amount(size, 'bytes')} at {length:,} tokens" for length, size in pairs)
    print_text(f"{conversation.reader.name}: {amounts}")

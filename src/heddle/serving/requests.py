"""Parse requests of the OpenAI API: every field is checked, and an unknown one is refused by name."""

import json
import math
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heddle.data.chat import ASSISTANT, CHAT_TEMPLATE_FILE, ROLES, ChatFormat, chat_template_text
from heddle.data.documents import UnreadableError
from heddle.errors import DataError, parse_error_reason, pip_install, shorten_value
from heddle.numerics.dispatch import optional_module
from heddle.progress import printable
from heddle.serving.limits import ServerLimits
from heddle.tokenization.tokenizer import Tokenizer

MAX_ALTERNATIVES = 20  # OpenAI's limits of top_logprobs and logprobs
MAX_MESSAGES = 1000
MAX_TOOLS = 128  # OpenAI's limit
MAX_CHOICES = 16  # texts of one request: prompts times n
DEFAULT_TOKENS = 128  # for requests that set no limit
TOO_LONG = "context_length_exceeded"  # OpenAI's code for a prompt that is too long
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")  # the second one is vLLM's, as is top_k
_IGNORED_STREAM_OPTIONS = {"include_obfuscation"}  # padding against listeners, which OpenAI's own server adds
_SHARED_FIELDS = {
    "model", "max_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "seed", "stream",
    "stream_options", "logprobs", "n", "user",
}  # fmt: skip
_FIELDS = {
    "completions": _SHARED_FIELDS | {"prompt", "echo"},
    "chat": _SHARED_FIELDS
    | {"messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "response_format"},
}
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# Fields of the OpenAI API with the values, besides null, at which they have no effect: clients send them unasked.
_ANY = object()  # any value is accepted and ignored
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"], []),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "metadata": (_ANY,),
    "prompt_cache_key": (_ANY,),
    "safety_identifier": (_ANY,),
    "prompt_cache_retention": (_ANY,),
    "verbosity": ("medium",),
    "top_logprobs": (0,),
    # of vLLM, SGLang and llama.cpp, at their defaults
    "min_p": (0,),
    "typical_p": (1,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "length_penalty": (1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "priority": (0,),
    "ignore_eos": (False,),
    "no_stop_trim": (False,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "timings_per_token": (False,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),  # of a chat: its template writes them
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # without special tokens there are none between
    "add_generation_prompt": (True,),
    "separate_reasoning": (True, False),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "bad_words": ([],),
    "cache_prompt": (_ANY,),
    "request_id": (_ANY,),
}
_UNSET = (
    ("seed", -1),
    ("max_tokens", -1),
    ("max_completion_tokens", -1),
)  # llama.cpp's: a random seed, no limit
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})  # of a message's field that is not read


class RequestError(Exception):
    """A refused request: one sentence, the wrong field, the HTTP status, and when to retry.

    code: OpenAI's word for the reason, which libraries above its client look for; empty where it has none.
    """

    def __init__(
        self, sentence: str, field: str | None = None, status: int = 400, retry_seconds: int = 1, code: str = ""
    ) -> None:
        super().__init__(sentence)
        self.sentence, self.field, self.status, self.retry_seconds = sentence[:400], field, status, retry_seconds
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.sentence, "type": kind, "param": self.field, "code": self.code or None}}


class Grammar:
    """Constrains the next tokens of one text to JSON that follows a schema: llguidance's matcher.

    error: why it cannot continue, in llguidance's words; empty until then.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher, self.error = matcher, ""

    def masked(self, logits: Tensor) -> Tensor:
        """logits [1, vocab], −inf for tokens that cannot come next."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        known = min(len(bits), len(allowed))
        allowed[:known] = torch.from_numpy(bits[:known].astype(bool)).to(logits.device)
        self.error = self.error or self._matcher.get_error()
        return logits if self.error else logits.masked_fill(~allowed, -math.inf)

    def take(self, token: int) -> None:
        """Advance by one token."""
        if not self.error and not self._matcher.consume_token(token):
            self.error = self._matcher.get_error() or "the text no longer follows the schema"


class JsonGrammars:
    """Compiles JSON grammars for a tokenizer. end_ids: tokens that may end a text."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int]) -> None:
        """Raises RequestError where llguidance is not installed."""
        if optional_module("llguidance") is None:
            sentence = f"response_format: needs llguidance; install it with {pip_install('serve')}"
            raise RequestError(sentence, "response_format", 501)
        from llguidance import LLTokenizer, TokenizerWrapper

        class Words:
            """The tokenizer as llguidance reads it."""

            eos_token_id, bos_token_id = end_ids[0], None
            tokens = tuple(tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
            special_token_ids = tuple(tokenizer.special_tokens)

            def __call__(self, text: bytes) -> list[int]:
                return tokenizer.encode(text.decode("utf-8", "ignore"))

        self._tokenizer = LLTokenizer(TokenizerWrapper(Words()), eos_token=list(end_ids))

    def compile(self, schema: Mapping[str, Any]) -> Callable[[], Grammar]:
        """A function that creates a grammar for one text. Raises RequestError for an unsupported schema."""
        from llguidance import LLMatcher

        # fixed whitespace: where it is free, a small model may write nothing else
        try:
            grammar = LLMatcher.grammar_from_json_schema(dict(schema), defaults={"whitespace_flexible": False})
            reason = LLMatcher.validate_grammar(grammar, self._tokenizer)
        except ValueError as error:
            reason = str(error) or type(error).__name__
        if reason:
            sentence = f"response_format: the schema cannot be followed ({printable(reason)[:200]})"
            raise RequestError(sentence, "response_format")
        return lambda: Grammar(LLMatcher(self._tokenizer, grammar, log_level=0))  # its errors go to the client


@dataclass(frozen=True)
class TextRequest:
    """A prompt and how to continue it. alternatives: how many tokens to score beside the chosen one; None: no score.

    stop_ids: tokens that end the text besides the tokenizer's `eos_ids`, such as the end of a turn.
    echo: text of the prompt that the answer begins with; with `alternatives`, its tokens are scored, too.
    has_tools: the answer may contain tool calls.
    grammar: creates the grammar that its tokens follow.
    include_usage: token counts come at the end of a stream; continuous_usage: with each chunk, too.
    """

    prompt_ids: list[int]
    new_tokens: int
    temperature: float
    top_p: float | None
    seed: int
    stop: tuple[str, ...] = ()
    alternatives: int | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    top_k: int | None = None
    stop_ids: tuple[int, ...] = ()
    echo: str | None = None
    has_tools: bool = False
    grammar: Callable[[], Grammar] | None = None


class RequestReader:
    """Parses requests to one model. name: what clients call it."""

    def __init__(self, tokenizer: Tokenizer, name: str, limits: ServerLimits) -> None:
        """Raises DataError for a chat template that cannot be read."""
        self.tokenizer, self.name, self.limits = tokenizer, name, limits
        self._grammars: JsonGrammars | None = None  # made when a request asks for one
        self._lock = threading.Lock()
        added = [len(text) for text in tokenizer.special_tokens.values()]
        self._longest_token = max([*(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)), *added])
        files = tokenizer.companion_files
        try:
            self.chat_format = None if chat_template_text(files) is None else ChatFormat(tokenizer, files)
        except UnreadableError as error:
            raise DataError(f"{CHAT_TEMPLATE_FILE}: {error}; restore the model's folder") from error

    def check_model(self, name: object) -> None:
        """Raises RequestError for the name of another model."""
        if name != self.name:
            status, code = (404, "model_not_found") if isinstance(name, str) else (400, "")
            raise RequestError(f"model: must be '{self.name}', the only one of this server", "model", status, code=code)

    def read(self, kind: str, body: bytes) -> TextRequest:
        """Parse a body that asks for one text. Raises RequestError."""
        return self.read_choices(kind, body)[0]

    def read_choices(self, kind: str, body: bytes) -> list[TextRequest]:
        """Parse a body of this kind, `completions` or `chat`: `n` texts for each prompt. Raises RequestError.

        The texts of a prompt are sampled with consecutive seeds, from the request's on.
        """
        fields = parse_object(body)
        fields = {name: value for name, value in fields.items() if value is not None}
        fields = {name: value for name, value in fields.items() if (name, value) not in _UNSET}
        for name in sorted(set(fields) - _FIELDS[kind]):
            if _is_neutral(fields[name], _NEUTRAL.get(name, ())):
                continue
            if name == "logit_bias" and isinstance(fields[name], dict) and not any(fields[name].values()):
                continue
            if name == "best_of" and fields[name] == fields.get("n", 1):  # every text is returned
                continue
            if name == "add_special_tokens" and kind == "completions" and fields[name] is True:
                continue
            if home := next((_PATHS[other] for other in _FIELDS if name in _FIELDS[other]), None):
                raise RequestError(f"{name}: is read at {home} only; ask there, or leave it out", name)
            if name not in _NEUTRAL:
                raise RequestError(f"{shorten_value(name)}: is not a field that this server knows; leave it out", name)
            neutral = " or ".join(json.dumps(value) for value in _NEUTRAL[name])
            raise RequestError(f"{name}: is not supported; leave it out, or give {neutral}", name)
        self.check_model(fields.get("model", self.name))
        count = int(_number(fields, "n", 1, (1, MAX_CHOICES), whole=True))
        _text(fields, "user", "")
        options = fields.get("stream_options", {})
        if not isinstance(options, dict) or set(options) - set(_STREAM_OPTIONS) - _IGNORED_STREAM_OPTIONS:
            raise RequestError(f"stream_options: may have only {' and '.join(_STREAM_OPTIONS)}", "stream_options")
        options = {name: value for name, value in options.items() if value is not None}
        temperature = float(_number(fields, "temperature", 1.0, (0.0, 2.0)))
        top_p = float(_number(fields, "top_p", 1.0, (0.0, 1.0)))
        if top_p == 0.0:
            raise RequestError("top_p: must be above 0 and at most 1", "top_p")
        tools = self._tools(fields) if kind == "chat" else None
        prompts = [(self._messages(fields, tools), None)] if kind == "chat" else self._prompts(fields)
        if len(prompts) * count > MAX_CHOICES:
            sentence = f"n: {len(prompts)} prompts times {count} exceed {MAX_CHOICES} texts; ask for fewer at a time"
            raise RequestError(sentence, "n")
        first = TextRequest(
            prompt_ids=prompts[0][0],
            new_tokens=self._new_tokens(fields, kind, least=0 if prompts[0][1] is not None else 1),
            temperature=temperature,
            top_p=None if top_p == 1.0 else top_p,
            top_k=max(0, int(_number(fields, "top_k", 0, (-1, self.tokenizer.vocab_size), whole=True))) or None,
            seed=int(_number(fields, "seed", secrets.randbelow(2**31), (0, 2**62 - 1), whole=True)),
            stop=self._stop_strings(fields),
            stop_ids=self._stop_ids(fields, kind),
            alternatives=_chat_alternatives(fields) if kind == "chat" else _alternatives(fields),
            stream=_truth(fields, "stream"),
            include_usage=_truth(options, "include_usage"),
            continuous_usage=_truth(options, "continuous_usage_stats"),
            has_tools=tools is not None,
            grammar=self._grammar(fields),
        )
        return [
            replace(first, prompt_ids=prompt_ids, echo=echo, seed=(first.seed + index) % 2**62)
            for prompt_ids, echo in prompts
            for index in range(count)
        ]

    def _new_tokens(self, fields: Mapping[str, Any], kind: str, least: int) -> int:
        name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
        if "max_tokens" in fields and fields["max_tokens"] != fields[name]:
            raise RequestError(f"{name}: differs from max_tokens, its older name; give only one of them", name)
        default = min(DEFAULT_TOKENS, self.limits.max_new_tokens)
        note = f"; {raised_by('max_new_tokens')}" + (", and 0 needs echo" if least and kind == "completions" else "")
        return int(_number(fields, name, default, (least, self.limits.max_new_tokens), whole=True, note=note))

    def _stop_ids(self, fields: Mapping[str, Any], kind: str) -> tuple[int, ...]:
        """Tokens that end the text: `stop_token_ids`, special tokens among `stop`, and the end of a turn."""
        ids, size = fields.get("stop_token_ids", []), self.tokenizer.vocab_size
        is_list = isinstance(ids, list) and len(ids) <= self.limits.max_stops
        if not is_list or not all(type(token) is int and 0 <= token < size for token in ids):
            most = self.limits.max_stops
            sentence = f"stop_token_ids: must be a list of at most {most} tokens, each from 0 to {size - 1}"
            sentence += f"; {raised_by('max_stops')}"
            raise RequestError(sentence, "stop_token_ids")
        stops = self._stop_strings(fields)
        named = [token for token, text in self.tokenizer.special_tokens.items() if text in stops]  # no text holds one
        turns = self.chat_format.turn_end_ids if kind == "chat" and self.chat_format is not None else ()
        return tuple(dict.fromkeys([*ids, *named, *turns]))

    def _stop_strings(self, fields: Mapping[str, Any]) -> tuple[str, ...]:
        stop = fields.get("stop", [])
        strings = [stop] * bool(stop) if isinstance(stop, str) else stop
        if not isinstance(strings, list) or len(strings) > self.limits.max_stops:
            most = f"{self.limits.max_stops}; {raised_by('max_stops')}"
            raise RequestError(f"stop: must be a string, or a list of at most {most}", "stop")
        for text in strings:
            if not isinstance(text, str) or not 0 < len(text) <= self.limits.max_stop_length:
                longest = f"{self.limits.max_stop_length} characters; {raised_by('max_stop_length')}"
                raise RequestError(f"stop: each must be a string of 1 to {longest}", "stop")
        return tuple(strings)

    def _prompts(self, fields: Mapping[str, Any]) -> list[tuple[list[int], str | None]]:
        """The tokens of each prompt, and its text where the answer begins with it."""
        prompt, has_echo = fields.get("prompt", ""), _truth(fields, "echo")
        several = isinstance(prompt, list) and bool(prompt) and all(isinstance(each, str | list) for each in prompt)
        prompts = prompt if several else [prompt]
        if len(prompts) > MAX_CHOICES:
            raise RequestError(f"prompt: {len(prompts):,} prompts are more than {MAX_CHOICES}; send fewer", "prompt")
        texts: list[tuple[list[int], str | None]] = []
        for each in prompts:
            tokens, echo = self._prompt(each), None
            if has_echo:
                echo = each if isinstance(each, str) else self.tokenizer.decode(tokens)
            texts.append((tokens, echo))
        return texts

    def _prompt(self, prompt: Any) -> list[int]:
        vocab_size = self.tokenizer.vocab_size
        if isinstance(prompt, str):
            self._refuse_long_text(prompt, "prompt")
            tokens = [*self.tokenizer.bos_ids, *self._encoded(prompt)] or self.tokenizer.eos_ids[:1]
        elif isinstance(prompt, list) and prompt and all(type(x) is int and 0 <= x < vocab_size for x in prompt):
            tokens = prompt
        else:
            raise RequestError(f"prompt: must be strings, or lists of tokens from 0 to {vocab_size - 1}", "prompt")
        return self._within_limit(tokens, "prompt")

    def _encoded(self, text: str) -> list[int]:
        try:
            return self.tokenizer.encode(text)
        except DataError as error:
            raise RequestError(f"prompt: {error}", "prompt") from error

    def _grammar(self, fields: Mapping[str, Any]) -> Callable[[], Grammar] | None:
        """The grammar for `response_format`: JSON, or JSON that follows a schema; None for plain text."""
        form = fields.get("response_format", {"type": "text"})
        kind = form.get("type") if isinstance(form, dict) else None
        if kind == "text":
            return None
        schema: Any = {"type": "object"}
        if kind == "json_object" and form.get("schema") is not None:  # as llama.cpp's
            schema = form["schema"]
        if kind == "json_schema":
            inner = form.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else None
        if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
            sentence = "response_format: must be text, json_object, or json_schema with a schema"
            raise RequestError(sentence, "response_format")
        with self._lock:
            if self._grammars is None:
                turns = () if self.chat_format is None else self.chat_format.turn_end_ids
                self._grammars = JsonGrammars(self.tokenizer, list(dict.fromkeys([*self.tokenizer.eos_ids, *turns])))
        return self._grammars.compile(schema)

    def _tools(self, fields: Mapping[str, Any]) -> list[Any] | None:
        """The functions that the answer may call; None where it may call none."""
        tools, choice = fields.get("tools", []), fields.get("tool_choice", "auto")
        if choice not in ("none", "auto"):
            raise RequestError("tool_choice: must be none or auto; this server cannot force a call", "tool_choice")
        if not isinstance(tools, list) or len(tools) > MAX_TOOLS or not all(map(_is_function, tools)):
            sentence = f"tools: must be a list of at most {MAX_TOOLS} functions, each with a type and a name"
            raise RequestError(sentence, "tools")
        if not tools or choice == "none":
            return None
        if self.chat_format is None or not self.chat_format.takes_tools:
            raise RequestError("tools: this model's chat template does not support them; leave them out", "tools")
        self._refuse_special_tokens(tools, "tools")
        return tools

    def _refuse_special_tokens(self, value: Any, field: str) -> None:
        """Raise RequestError if a client's text has a special token, which only the template may write."""
        specials = self.chat_format.reserved_texts if self.chat_format else self.tokenizer.special_tokens.values()
        if any(special in text for text in _texts_in(value) for special in specials):
            raise RequestError(f"{field}: a content contains a special token of the model; leave it out", field)

    def _messages(self, fields: Mapping[str, Any], tools: list[Any] | None) -> list[int]:
        if self.chat_format is None:
            remedy = "use /v1/completions, or import it with `heddle import --chat-template`"
            raise RequestError(f"messages: this model has no chat template; {remedy}", "messages")
        messages = fields.get("messages")
        if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
            raise RequestError(f"messages: must be a list of 1 to {MAX_MESSAGES} messages", "messages")
        messages = [self._message(message) for message in messages]
        self._refuse_long_text("".join(message["content"] or "" for message in messages), "messages")
        if not self.chat_format.takes_calls and any("tool_calls" in message for message in messages):
            sentence = "messages: this model's chat template does not support tool_calls; leave them out"
            raise RequestError(sentence, "messages")
        try:
            tokens = self.chat_format.encode_prompt(messages, tools)
        except (UnreadableError, DataError) as error:
            raise RequestError(f"messages: the conversation {error}", "messages") from error
        return self._within_limit(tokens, "messages")

    def _message(self, message: Any) -> dict[str, Any]:
        """A message's role and text, an assistant's tool calls, and the call that a tool's message answers.

        Text parts are joined. `name` is ignored unless the role is tool: templates read no other.
        """
        if isinstance(message, dict) and message.get("role") == "developer":  # OpenAI's later name of the same role
            message = message | {"role": "system"}
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise RequestError(f"messages: each must have a role ({', '.join(ROLES)}) and text content", "messages")
        role = message["role"]
        read = {"role": role}
        if role == ASSISTANT and message.get("tool_calls"):
            read["tool_calls"] = self._tool_calls(message["tool_calls"])
        if role == "tool":
            read |= {name: _text(message, name, "") for name in ("tool_call_id", "name") if message.get(name)}
        for name in sorted(set(message) - {"role", "content", "name"} - set(read)):
            if not _is_neutral(message[name], _NOTHING):
                raise RequestError(
                    f"messages: this server does not support {shorten_value(name)}; leave it out", "messages"
                )
        content = message.get("content")
        if isinstance(content, list):
            content = self._joined_parts(content)
        if content is None and role == ASSISTANT and "tool_calls" not in read:  # an empty answer, sent back
            content = ""
        if not isinstance(content, str) and not (content is None and "tool_calls" in read):
            raise RequestError("messages: a content must be a string, or a list of text parts", "messages")
        for value in (content or "", read):
            self._refuse_special_tokens(value, "messages")
        return read | {"content": content}

    @staticmethod
    def _tool_calls(calls: Any) -> list[dict[str, Any]]:
        """An assistant's tool calls in the form that templates read: with arguments as dicts, not as JSON strings."""
        read = []
        if not isinstance(calls, list) or not all(map(_is_function, calls)):
            raise RequestError("messages: each of tool_calls needs a type and a named function", "messages")
        for call in calls:
            function = call["function"]
            try:
                arguments = json.loads(function.get("arguments") or "{}", parse_constant=_refuse_constant)
            except (TypeError, ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                raise RequestError("messages: arguments of tool_calls must be a JSON object in a string", "messages")
            table = {"name": function["name"], "arguments": arguments}
            read.append({"id": str(call.get("id", "")), "type": "function", "function": table})
        return read

    @staticmethod
    def _joined_parts(parts: list[Any]) -> str:
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                what = shorten_value(kind) if isinstance(kind, str) and kind != "text" else "not text"
                raise RequestError(f"messages: a content part is {what}; this server reads only text", "messages")
        return "".join(part["text"] for part in parts)

    def _refuse_long_text(self, text: str, field: str) -> None:
        """Refuse a text that is too long for any tokenization, before tokenizing it. Raises RequestError."""
        least = len(text) // self._longest_token
        if least > self.limits.max_prompt:
            reads = f"this server reads 1 to {self.limits.max_prompt:,}; {raised_by('max_prompt')}"
            raise RequestError(f"{field}: has at least {least:,} tokens; {reads}", field, code=TOO_LONG)

    def _within_limit(self, tokens: list[int], field: str) -> list[int]:
        most = self.limits.max_prompt
        if not 0 < len(tokens) <= most:
            reads = f"this server reads 1 to {most:,}" + (f"; {raised_by('max_prompt')}" if tokens else "")
            code = TOO_LONG if tokens else ""
            raise RequestError(f"{field}: has {len(tokens):,} tokens; {reads}", field, code=code)
        return tokens


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object. Raises RequestError."""
    try:
        fields = json.loads(
            body.decode("utf-8-sig"), parse_constant=_refuse_constant, object_pairs_hook=_without_repeats
        )
        json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("body: is not UTF-8 text; encode it as UTF-8") from error
    except UnicodeEncodeError as error:
        raise RequestError("body: has half a surrogate pair; send whole characters") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"body: is not JSON ({parse_error_reason(error)})") from error
    if not isinstance(fields, dict):
        raise RequestError("body: must be a JSON object")
    return fields


def _texts_in(value: Any) -> Iterator[str]:
    """The strings of plain data, keys included. (In JSON, some of their characters would be escaped.)"""
    inner = [value]
    while inner:
        part = inner.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict):
            inner += [*part, *part.values()]
        elif isinstance(part, list):
            inner += part


def _is_function(tool: Any) -> bool:
    """Whether a tool is a function with a name, as OpenAI's interface writes it."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is one of these, and of the same type: 0 is not false."""
    kinds = (bool,)
    return any(
        other is _ANY or (value == other and isinstance(value, kinds) == isinstance(other, kinds)) for other in neutral
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise RequestError(f"body: has {shorten_value(name)} twice in one object; send it once")
    return fields


def raised_by(limit: str) -> str:
    """Which option of the server raises a limit: clients do not see its options."""
    return f"its operator can raise --{limit.replace('_', '-')}"


def _number(
    fields: Mapping[str, Any],
    name: str,
    default: float,
    between: tuple[float, float],
    whole: bool = False,
    note: str = "",
) -> float:
    value = fields.get(name, default)
    is_number = type(value) is int or (type(value) is float and not whole and math.isfinite(value))
    if not is_number or not between[0] <= value <= between[1]:
        what = "a whole number" if whole else "a number"
        raise RequestError(f"{name}: must be {what} from {between[0]} to {between[1]}{note}", name)
    return value if type(value) is int else float(value)


def _text(fields: Mapping[str, Any], name: str, default: str) -> str:
    value = fields.get(name, default)
    if not isinstance(value, str):
        raise RequestError(f"{name}: must be a string", name)
    return value


def _truth(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{name}: must be true or false", name)
    return value


def _alternatives(fields: Mapping[str, Any]) -> int | None:
    """How many alternatives `logprobs` of /v1/completions, a number, asks for."""
    if fields.get("logprobs", False) is False:
        return None
    return int(_number(fields, "logprobs", 0, (0, MAX_ALTERNATIVES), whole=True))


def _chat_alternatives(fields: Mapping[str, Any]) -> int | None:
    """How many alternatives `logprobs` of /v1/chat/completions, true or false, and `top_logprobs` ask for."""
    count = int(_number(fields, "top_logprobs", 0, (0, MAX_ALTERNATIVES), whole=True))
    if not _truth(fields, "logprobs"):
        if count:
            raise RequestError("top_logprobs: needs logprobs to be true", "top_logprobs")
        return None
    return count

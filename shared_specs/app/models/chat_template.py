"""The model's chat template: messages to text, and which of it the assistant says, as `transformers` does it with jinja2."""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared_specs.app.models.tokenizer import ModelTokenizer
from shared_specs.app.options import InputError

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
# Around what a generation block says, until they are taken out: no characters of any text (Unicode's noncharacters).
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")
_GENERATION = re.compile(r"\{%-?\s*generation\b")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return _BEGIN + caller() + _END


class RefusedError(ValueError):
    """The template cannot say these messages; the text is one line, for the middle of a sentence."""


@dataclass(frozen=True)
class ChatTemplate:
    """One model's template.

    Attributes:
        template: compiled. marks: whether it says itself what the assistant's is. special: the words that it may use.
    """

    template: jinja2.Template
    marks: bool
    special: Mapping[str, str]

    def render(self, messages: Messages, tools: Any = None) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the runs of its characters that the assistant says.

        Those are the template's generation blocks. Where it has none, for each of the assistant's turns what is there once it
        is, and was not when its turn came (`add_generation_prompt`).

        Raises:
            RefusedError: the template refuses the messages, or says a turn otherwise once others follow.
        """
        whole = self._text(messages, tools)
        if self.marks:
            return _without_marks(whole)
        spans = []
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._text(messages[:turn], tools, prompt=True)
                through = self._text(messages[: turn + 1], tools) if turn + 1 < len(messages) else whole
                if not (whole.startswith(through) and through.startswith(before)):
                    raise RefusedError(
                        f"the model's chat template says message {turn + 1} otherwise with what stands around it, so that "
                        "the assistant's part cannot be told: it needs {% generation %} blocks"
                    )
                spans.append((len(before), len(through)))
        return whole, spans

    def _text(self, messages: Messages, tools: Any, *, prompt: bool = False) -> str:
        try:
            return self.template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self.special
            )
        except jinja2.TemplateError as error:
            reason = error.message or type(error).__name__
        except Exception as error:  # what a template does with a message that is not as it expects
            reason = f"{type(error).__name__}: {error}"
        raise RefusedError(f"the model's chat template refuses it ({reason})")


def _without_marks(marked: str) -> tuple[str, list[Span]]:
    """Return the text of generation blocks, and where they were."""
    spans, begun, removed = [], 0, 0
    for found in _MARKS.finditer(marked):
        place = found.start() - removed
        removed += 1
        if found[0] == _BEGIN:
            begun = place
        else:
            spans.append((begun, place))
    return _MARKS.sub("", marked), spans


def chat_template(tokenizer: ModelTokenizer, source: object, today: datetime.date) -> ChatTemplate:
    """Return the template that came with a tokenizer: chat_template.jinja, or "chat_template" in tokenizer_config.json.

    Args:
        source: the model's path, for messages. today: the date that a template is told.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    config = _json(tokenizer, "tokenizer_config.json")
    own = tokenizer.files.get("chat_template.jinja")
    text = own.decode("utf-8", "replace") if own is not None else config.get("chat_template")
    if isinstance(text, list):  # several by name
        named = {each.get("name"): each.get("template") for each in text if isinstance(each, dict)}
        text = named.get("default")
    if not isinstance(text, str):
        raise InputError(
            f"finetune: --chat needs a chat template, and --model {source} has none: no chat_template.jinja, and no "
            '"chat_template" in its tokenizer_config.json. Add one, or use an instruct model\'s folder.'
        )
    try:
        template = _environment(today).from_string(text)
    except jinja2.TemplateError as error:
        raise InputError(f"finetune: --model {source}: its chat template cannot be read ({error.message}).") from error
    words = _json(tokenizer, "special_tokens_map.json") | config
    special = {name: _word(words[name]) for name in _SPECIAL if words.get(name) is not None}
    return ChatTemplate(template, _GENERATION.search(text) is not None, special)


def _environment(today: datetime.date) -> jinja2.Environment:
    """Return the surroundings that templates of the Hugging Face hub expect; they are others' programs, so in a sandbox."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)  # jinja2's own would escape for HTML

    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    found.filters["tojson"] = to_json
    found.globals |= {"raise_exception": refuse, "strftime_now": today.strftime}
    return found


def _json(tokenizer: ModelTokenizer, name: str) -> dict[str, Any]:
    try:
        found = json.loads(tokenizer.files.get(name, b"{}"))
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def _word(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, Mapping) else str(value)

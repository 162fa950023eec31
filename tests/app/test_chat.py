"""`--chat`: what the model's template says of messages, which of its tokens count, and what is refused in one line."""

import datetime
import json

import numpy as np
import pytest

from shared_specs.app.data.batches import IGNORED
from shared_specs.app.data.chat import tokenized
from shared_specs.app.data.choice import make_data
from shared_specs.app.models.chat_template import chat_template
from shared_specs.app.models.weights import read_model
from shared_specs.app.options import FinetuneOptions, InputError
from tests.tiny_model import write_tiny_folder

DAY = datetime.date(2026, 11, 24)
TURN = "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
PLAIN = (
    "{% for message in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MARKED = """{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|start|>assistant\n' }}{% generation %}{{- message['content'] + eos_token }}{% endgeneration %}{{- '\n' }}
    {%- elif message['role'] == 'user' %}
        {{- '<|start|>user\n' + message['content'] + '<|end|>\n' }}
    {%- elif message['role'] == 'system' %}
        {{- raise_exception('no system here, today is ' + strftime_now('%d %b %Y')) }}
    {%- endif %}
{%- endfor %}"""
# Of every turn but the last one it leaves something out.
FORGETS = PLAIN.replace("{{ message['content'] }}", "{% if loop.last %}Well: {% endif %}{{ message['content'] }}")
CHAT = [
    {"role": "user", "content": "the sun"},
    {"role": "assistant", "content": "in a house"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "on the tiles"},
]


@pytest.fixture
def folder(tmp_path):
    return write_tiny_folder(tmp_path / "model")


def with_template(folder, template, file="chat_template.jinja"):
    if file == "chat_template.jinja":
        (folder / file).write_text(template)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": "<|start|>"}
    if file != "chat_template.jinja":
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return read_model(folder)


def said(files, messages, **more):
    conversation = {"messages": messages, **more}
    found = tokenized(
        conversation, files.tokenizer, chat_template(files.tokenizer, files.source, DAY), "conversation 1"
    )
    words = files.tokenizer.backend.decode(found.ids[found.said].tolist(), skip_special_tokens=False)
    return found.ids.tolist(), words


def transformers_tokenizer(folder):
    transformers = pytest.importorskip("transformers", reason="the JAX half does without it")
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_tokens_are_those_of_transformers_and_the_assistants_count(folder, file):
    ids, words = said(with_template(folder, PLAIN, file), CHAT)
    assert transformers_tokenizer(folder).apply_chat_template(CHAT, return_dict=True)["input_ids"] == ids
    assert words == "in a house<|end|>\non the tiles<|end|>\n"


def test_generation_blocks_say_what_counts(folder):
    ids, words = said(with_template(folder, MARKED), CHAT)
    theirs = transformers_tokenizer(folder).apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    assert theirs["input_ids"] == ids
    assert words == "in a house<|end|>on the tiles<|end|>"
    decoded = transformers_tokenizer(folder).decode(np.array(ids)[np.array(theirs["assistant_masks"]) == 1])
    assert decoded == words


def test_tools_reach_the_template(folder):
    files = with_template(folder, "{{ tools | tojson }}" + PLAIN)
    ids, _ = said(files, CHAT, tools=[{"name": "sun"}])
    assert files.tokenizer.backend.decode(ids).startswith('[{"name": "sun"}]')


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (MARKED, [{"role": "system", "content": "x"}, *CHAT], r"refuses it \(no system here, today is 24 Nov 2026\)"),
        (MARKED, [{"role": "narrator", "content": "once"}, *CHAT], "leaves out what the role 'narrator' says"),
        (FORGETS, CHAT, r"says message 2 otherwise .* it needs \{% generation %\} blocks"),
        (MARKED, [{"role": "assistant", "tool_calls": [1]}], r"refuses it \('dict object' has no attribute 'content'\)"),
        (PLAIN + "{% generation %}{% endgeneration %}", CHAT, "nothing in it"),
    ],
    ids=["raises", "unknown role", "forgets", "no content", "empty"],
)  # fmt: skip
def test_what_a_template_does_not_say(folder, template, messages, words):
    with pytest.raises(InputError, match=f"^finetune: conversation 1: .*{words}"):
        said(with_template(folder, template), messages)


def data(folder, path, content, template=PLAIN, **options):
    path.write_text(content)
    files = with_template(folder, template)
    return make_data(FinetuneOptions(model=str(folder), chat=str(path), **options), files, files.config, DAY)


def lines(*conversations):
    return "\n".join(json.dumps({"messages": messages}) for messages in conversations)


SHORT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_a_conversation_is_a_row_and_one_that_is_longer_is_cut(folder, tmp_path):
    late = [{"role": "user", "content": "the " * 50}, CHAT[1]]
    found = data(folder, tmp_path / "chat", lines(CHAT, SHORT, late), tokens=40)
    assert found.told.startswith("chat of 2 conversations, ")
    assert found.told.endswith("; 2 longer than --tokens are cut; 1 of them left out, whose assistant comes later")
    batch = found.at(0, 2)
    assert batch.position_ids is None
    row = int(np.argmin((batch.input_ids != 0).sum(1)))
    labels = batch.shift_labels[row][batch.shift_labels[row] != IGNORED]
    assert read_model(folder).tokenizer.backend.decode(labels, skip_special_tokens=False) == "b<|end|>\n"
    as_list = json.dumps([{"messages": messages} for messages in (CHAT, SHORT, late)])
    assert data(folder, tmp_path / "list", as_list, tokens=40).digest() == found.digest()


def test_packed_conversations_stay_whole(folder, tmp_path):
    found = data(folder, tmp_path / "chat", lines(*[SHORT] * 5), tokens=64, pack=True)
    length = len(said(read_model(folder), SHORT)[0])
    assert f", packed into {-(-5 // (64 // length))} sequences" in found.told
    batch = found.at(0, len(found.rows))
    assert (batch.position_ids == 0).sum() == 5 + len(found.rows), "and one for the padding of each row"
    assert batch.valid == 5 * 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (" ", "must hold text, got .*, which is empty"),
        ("[]", "must hold conversations, got .*, which has none"),
        ('{"messages": [}', "line 1 is no JSON"),
        ('{"text": "x"}', r'conversation 1 must be .*, got no "messages" \(its keys are text\)'),
        (f"{lines(SHORT)}\n[1]", "conversation 2 must be .*, got a list"),
        (lines([]), "conversation 1 must be .*, got no messages in it"),
        (lines([{"content": "x"}]), 'got message 1 without a "role"'),
        (lines([{"role": "user"}]), 'got message 1 without a "content"'),
        (lines(SHORT, SHORT[:1]), "conversation 2 has no turn of the assistant"),
        (
            lines([{"role": "user", "content": "a" * 99}, SHORT[1]]),
            "--tokens must be greater, got 16: every conversation",
        ),
    ],
)
def test_refused(folder, tmp_path, content, words):
    with pytest.raises(InputError, match=f"^finetune: .*{words}"):
        data(folder, tmp_path / "chat", content, tokens=16)


def test_a_model_without_a_template(folder, tmp_path):
    (tmp_path / "chat").write_text(lines(SHORT))
    files = read_model(folder)
    options = FinetuneOptions(model=str(folder), chat=str(tmp_path / "chat"))
    with pytest.raises(
        InputError, match=r'has none: no chat_template.jinja, and no "chat_template" in its tokenizer_config'
    ):
        make_data(options, files, files.config, DAY)
    with pytest.raises(InputError, match=r"its chat template cannot be read \("):
        chat_template(with_template(folder, "{% for %}").tokenizer, folder, DAY)


def test_text_and_chat_exclude_each_other():
    with pytest.raises(InputError, match=r"^finetune: --text and --chat exclude each other"):
        FinetuneOptions(text="a", chat="b").check()

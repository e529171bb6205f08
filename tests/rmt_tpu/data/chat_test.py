"""Chat templates: how a conversation becomes text and tokens, and what damaged ones are told."""

import builtins
import datetime
import json

import pytest

from rmt_tpu.data import ByteTokenizer, ChatTemplate, read_template
from rmt_tpu.errors import UsageError
from rmt_tpu.storage import open_folder
from tests.chats import CHATML, special_tokenizer

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
HELLO_TEXT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"


def made(source: str, tokenizer=None, **options) -> ChatTemplate:
    return ChatTemplate(source, tokenizer or ByteTokenizer(), **options)


def test_a_conversation_as_text():
    template = made(CHATML)
    assert template.render(HELLO) == HELLO_TEXT
    asked = template.render(HELLO[:1], add_generation_prompt=True)
    assert asked == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_names_of_special_tokens_count_in_a_conversation_alone():
    tokenizer = special_tokenizer()
    start, end = (tokenizer.token_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    plain = lambda text: tokenizer.encode(text).tolist()
    tokens = made(CHATML, tokenizer).encode(HELLO_TEXT).tolist()
    user = [start, *plain("user\nHi"), end, *plain("\n")]
    assert tokens == [*user, start, *plain("assistant\nYes?"), end, *plain("\n")]
    assert start not in plain(HELLO_TEXT) and tokenizer.decode(plain(HELLO_TEXT)) == HELLO_TEXT
    assert tokenizer.encode_special("<s>a").tolist() == [tokenizer.bos, *plain("a")]
    with pytest.raises(UsageError, match="unpaired surrogate"):
        tokenizer.encode_special("\ud800")


@pytest.mark.parametrize(
    "source, eos, names",
    [
        (CHATML, "</s>", ["<|im_end|>", "</s>"]),
        (CHATML, "<|im_end|>", ["<|im_end|>"]),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", "</s>", ["</s>"]),
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "</s>", ["</s>"]),
        ("{% for m in messages %}<|im_start|>{{ m.content }};{% endfor %}", "<unknown>", []),
        ("<|im_end|>{{ messages[0].content }}", "", []),
        ("{{ raise_exception('no') }}", "</s>", ["</s>"]),
    ],
)
def test_the_tokens_that_end_an_answer(source, eos, names):
    tokenizer = special_tokenizer()
    template = made(source, tokenizer, names={"eos_token": eos})
    assert [tokenizer.token_name(token) for token in template.answer_ends()] == names
    assert made(source).answer_ends() == ()  # a tokenizer of bytes has no such names


def test_how_a_conversation_starts():
    """As the template has it, but for a run's model, which has read a start token each time."""
    tokenizer = special_tokenizer()
    for starts in (False, True):
        template = made("", tokenizer, starts=starts)
        bare = [*tokenizer.encode("a")]
        assert template.encode("a").tolist() == [tokenizer.bos] * starts + bare
        assert template.encode("<s>a").tolist() == [tokenizer.bos, *bare]
        assert template.encode("").tolist() == [tokenizer.bos]
    assert made("", starts=True).encode("a").tolist() == [ByteTokenizer.bos, ord("a")]


@pytest.mark.parametrize(
    "source, starts, changed",
    [
        (CHATML, True, True),
        ("  {% if true %}\n a\n  {% endif %}", True, True),
        ("{{ bos_token }}" + CHATML, True, False),
        ("{{ raise_exception('A system prompt is needed.') }}", True, False),
        (CHATML, False, False),
    ],
)
def test_a_template_that_writes_the_start_of_training(source, starts, changed):
    """The template writes the start token itself, and the rest of the text is the same."""
    template = made(source, special_tokenizer(), names={"pad_token": ""}, starts=starts)
    written = template.standalone_json()
    assert set(written) == {"bos_token", "eos_token", "chat_template"}
    assert (written["chat_template"] != source) == changed
    if changed:
        alone = made(written["chat_template"], special_tokenizer())
        assert alone.render(HELLO) == f"<s>{template.render(HELLO)}"


def test_what_templates_find():
    """The variables, filters and tags that transformers has."""
    names = special_tokenizer()
    assert made("{{ bos_token }}|{{ eos_token }}", names).render([]) == "<s>|<s>"
    named = made("{{ bos_token }}{{ sep_token }}", names, names={"sep_token": "[S]"})
    assert named.render([]) == "<s>[S]"
    assert made("{{ bos_token }}{{ tools }}").render([]) == "None"
    assert made("{{ messages | tojson }}").render([{"a": "<é>"}]) == '[{"a": "<é>"}]'
    assert made("{{ x | tojson(indent=1) }}").render([], x=[1]) == "[\n 1\n]"
    loop = "{% for m in x %}{% if m == 3 %}{% break %}{% endif %}{{ m }}{% endfor %}"
    assert made(loop).render([], x=[1, 2, 3, 4]) == "12"
    assert made("  {% if true %}\n1\n  {% endif %}\n2").render([]) == "1\n2"
    today = made("{{ strftime_now('%Y') }}").render([])
    assert today == str(datetime.datetime.now().year)
    assert made("{{ thinking }}").render([], thinking=False) == "False"


@pytest.mark.parametrize(
    "source, words",
    [
        ("{{ raise_exception('No\\n system.') }}", "the chat template refuses the messages: No sy"),
        ("{{ messages.append(1) }}", "the chat template fails: SecurityError: "),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails: SecurityError: "),
        ("{{ messages[0].content.x }}", "the chat template fails: UndefinedError: "),
        ("{{ 1 / 0 }}", "the chat template fails: ZeroDivisionError: division by zero"),
        ("a\n{% for %}", "the chat template:2 is not a valid template: "),
    ],
)
def test_templates_that_fail(source, words):
    with pytest.raises(UsageError) as error:
        made(source).render([])
    assert str(error.value).startswith(words) and "\n" not in str(error.value)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(ChatTemplate, "installed", staticmethod(lambda: False))
    for call in (lambda t: t.check(), lambda t: t.render([])):
        with pytest.raises(UsageError, match=r"need jinja2: pip install 'rmt_tpu\[chat\]'"):
            call(made("a"))


def test_no_template_needs_the_library_until_it_is_used(monkeypatch):
    def importing(name, *arguments):
        assert name.partition(".")[0] != "jinja2"
        return real(name, *arguments)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", importing)
    template = made("{{ 1 }}")
    monkeypatch.undo()
    template.check()


def written(folder, config=None, template: str | None = None):
    """A folder of a model with these two files."""
    folder.mkdir()
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "tokenizer_config.json").write_text(text)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return open_folder(str(folder))


def rendered(folder) -> str | None:
    template = read_template(folder, special_tokenizer())
    return None if template is None else template.render([])


def test_where_a_template_is_found(tmp_path):
    config = {"chat_template": "{{ bos_token }}1", "bos_token": {"content": "[B]"}, "x_token": 5}
    assert rendered(written(tmp_path / "a", config)) == "[B]1"
    assert rendered(written(tmp_path / "b", config, "{{ bos_token }}2")) == "[B]2"
    assert rendered(written(tmp_path / "c", None, "{{ bos_token }}3")) == "<s>3"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert rendered(written(tmp_path / "d", {"chat_template": several})) == "d"
    assert rendered(written(tmp_path / "e", {"bos_token": "<s>"})) is None
    assert rendered(written(tmp_path / "f")) is None
    shows = {"chat_template": "{{ bos_token }}|{{ eos_token }}", "bos_token": None}
    none = read_template(written(tmp_path / "h", shows), special_tokenizer())
    assert none.render([]) == "|<s>"
    none.save(open_folder(str(tmp_path / "h")))
    assert rendered(open_folder(str(tmp_path / "h"))) == "|<s>"  # as the server reads it
    assert rendered(written(tmp_path / "i", shows | {"eos_token": None})) == "|"
    other = written(tmp_path / "g", config, "{{ bos_token }}4")
    file = str(tmp_path / "b/chat_template.jinja")
    assert read_template(other, special_tokenizer(), file=file).render([]) == "[B]2"
    with pytest.raises(UsageError, match="^nowhere cannot be read: No such file or directory; leg"):
        read_template(other, special_tokenizer(), file="nowhere")


@pytest.mark.parametrize(
    "config, template, words",
    [
        ("[", None, "/x/tokenizer_config.json is not a JSON object; legal: a JSON object, or no"),
        ([], None, "/x/tokenizer_config.json is not a JSON object"),
        ({"chat_template": 5}, None, "/x/tokenizer_config.json: chat_template=5 must be text, or"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}]}, None, 'the name "default"'),
        (None, "a\n{% if %}", "/x/chat_template.jinja:2 is not a valid template: "),
        ({"chat_template": "{{"}, None, "/x/tokenizer_config.json:1 is not a valid template: "),
    ],
)
def test_damaged_files(tmp_path, config, template, words):
    with pytest.raises(UsageError) as error:
        read_template(written(tmp_path / "x", config, template), ByteTokenizer()).check()
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_template_that_is_not_utf8(tmp_path):
    folder = written(tmp_path / "x")
    (tmp_path / "x/chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="chat_template.jinja is not UTF-8: invalid start byte"):
        read_template(folder, ByteTokenizer())

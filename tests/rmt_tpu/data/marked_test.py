"""Conversations and completions: which tokens have a loss, how they are packed, and stored."""

import datetime
import json
import random
from decimal import Decimal

import numpy as np
import pytest

from rmt_tpu.config import overrides, presets
from rmt_tpu.data import (
    ByteTokenizer,
    ChatTemplate,
    Windows,
    load_tokenizer,
    open_store,
    read_template,
)
from rmt_tpu.data import prepare as prepare_module
from rmt_tpu.data.batches import StreamInMemory, any_loss, cut, pack, whole_documents
from rmt_tpu.data.corpus import documents
from rmt_tpu.data.datasets import chat_template_of, load_datasets
from rmt_tpu.data.marked import (
    CONTEXT,
    Marked,
    Piece,
    conversation,
    encode_all,
    find_template,
    first_token,
    have_loss,
    without_marks,
)
from rmt_tpu.data.prepare import prepare
from rmt_tpu.errors import UsageError
from rmt_tpu.storage import open_folder
from tests.chats import special_tokenizer

BYTE = ByteTokenizer()
PLAIN = """\
{%- for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}
{%- if add_generation_prompt %}a:{% endif %}"""
MARKING = """\
{%- for message in messages %}{{ message.role[0] }}:
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }};{% endgeneration %}
{%- else %}{{ message.content }};{% endif %}{% endfor %}"""
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Go"},
    {"role": "assistant", "content": "No"},
    {"role": "user", "content": "Oh"},
]


def loss_text(tokens):
    """Return the text of the tokens that have a loss, with a bar before each run of them."""
    has_loss, text = have_loss(tokens), ""
    for n, token in enumerate(without_marks(tokens)):
        if has_loss[n]:
            text += ("" if n and has_loss[n - 1] else "|") + BYTE.decode([int(token)])
    return text


@pytest.mark.parametrize("source", [PLAIN, MARKING])
def test_what_the_assistant_says_has_a_loss(source):
    pieces = conversation(ChatTemplate(source, BYTE), TALK)
    assert "".join(text for text, _ in pieces) == "u:Hi;a:Yes?;u:Go;a:No;u:Oh;"
    assert [text for text, has_loss in pieces if has_loss and text] == ["Yes?;", "No;"]
    (tokens,) = encode_all([Marked(pieces, special=True)], BYTE)
    assert loss_text(tokens) == "|Yes?;|No;"
    assert BYTE.decode(without_marks(tokens)) == "u:Hi;a:Yes?;u:Go;a:No;u:Oh;"


# Like Qwen2.5's template: it has a default system message, and fails without messages.
SYSTEM = "{{ '' if messages[0].role == 'system' else 's:assist aYes?;' }}" + PLAIN
TRIMMED = SYSTEM.replace("message.content", "message.content | trim")


@pytest.mark.parametrize("source", [PLAIN, SYSTEM, TRIMMED])
@pytest.mark.parametrize("content", ["Yes?", " a", ""])
def test_a_conversation_may_begin_with_the_assistant(source, content):
    """The text that the template puts before the answer has no loss, whatever the answer is."""
    talk = [{"role": "assistant", "content": content}, *TALK[2:4]]
    pieces = conversation(ChatTemplate(source, BYTE), talk)
    said = content.strip() if source == TRIMMED else content
    assert [text for text, has_loss in pieces if has_loss] == [f"{said};", "No;"]
    assert pieces[0] == ("a:" if source == PLAIN else "s:assist aYes?;a:", False)


def test_a_template_that_changes_what_was_said_must_mark_answers():
    forgets = "{% for m in messages %}{{ m.content if loop.last else '-' }};{% endfor %}"
    with pytest.raises(UsageError, match="changes earlier messages .* {% generation %}"):
        conversation(ChatTemplate(forgets, BYTE), TALK[:4])
    thinks = PLAIN.replace("a:{% endif %}", "a:<think>{% endif %}")  # the answer has no <think>
    pieces = conversation(ChatTemplate(thinks, BYTE), TALK[:2])
    assert [text for text, has_loss in pieces if has_loss] == ["Yes?;"]


@pytest.mark.parametrize("source", [PLAIN, MARKING])
def test_conversations_have_the_same_date_every_day(source, tmp_path):
    """Or tokens and the choice of held-out documents would change from day to day."""
    template = ChatTemplate("{{ strftime_now('%d %b %Y, %H:%M') }};" + source, BYTE)
    said = write(tmp_path / "a.jsonl", [{"messages": TALK[:2]}])
    (found,) = documents(said, kind="messages", template=template)
    assert found == "26 Jul 2024, 00:00;u:Hi;a:Yes?;"
    assert [text for text, has_loss in found.pieces if has_loss] == ["Yes?;"]
    assert str(datetime.date.today().year) in template.render(TALK)


def test_marks_of_a_template_are_no_part_of_its_text():
    template = ChatTemplate(MARKING, BYTE)
    assert template.render(TALK) == ChatTemplate(PLAIN, BYTE).render(TALK)


def test_a_slice_keeps_its_marks():
    text = Marked([Piece("ab", False), Piece("cd", True), Piece("ef", False)], special=False)
    assert text == "abcdef" and text[1:4].pieces == (("b", False), ("cd", True), ("", False))
    head, tail = cut(Marked([Piece("a b ", False), Piece("c d e", True)], special=True), 0.4)
    assert (head + tail, tail.pieces[-1].has_loss, head.special) == ("a b c d e", True, True)


def test_a_template_s_own_first_token_is_left_out():
    document = Marked([Piece("a", False), Piece("b", True)], special=True)
    bos = BYTE.bos

    class Starting(ByteTokenizer):
        def encode_special(self, text):
            return np.array([bos, *super().encode(text)], np.int32)

    (tokens,) = encode_all([document], Starting())
    assert tokens.tolist() == [ord("a") | CONTEXT, bos, ord("b")]


def test_windows_have_whole_documents_unless_one_is_too_long():
    bounds = np.array([0, 3, 5, 9, 20, 21], np.int64)
    assert whole_documents(bounds, 5).tolist() == [0, 5, 9, 14, 19, 21]
    generator = random.Random(0)
    for _ in range(50):
        lengths = [generator.randint(1, 12) for _ in range(generator.randint(1, 30))]
        bounds, longest = np.cumsum([0, *lengths]), generator.randint(1, 10)
        found = whole_documents(bounds, longest)
        assert found[0] == 0 and found[-1] == bounds[-1]
        assert (np.diff(found) > 0).all() and (np.diff(found) <= longest).all()
        for begin, end in zip(bounds, bounds[1:], strict=False):
            within = [f for f in found if begin < f < end]
            assert not within or end - begin > longest, "a document that fits is divided"


def test_every_token_is_a_target_once_and_only_marked_ones_have_a_weight():
    texts = [
        Marked([Piece("p" * n, False), Piece("c" * (n % 5 + 1), True)], special=False)
        for n in range(1, 40)
    ]
    tokens, bounds = pack(texts, BYTE, "completion")
    windows = Windows(
        tokens,
        seq_len=24,
        batch_size=4,
        bos=BYTE.bos,
        seed=0,
        shuffle=True,
        bounds=bounds,
    )
    targets, total, begins = [], 0, 0
    for position in range(0, windows.num_windows, 4):
        batch = windows.batch_at(position, slice(0, min(4, windows.num_windows - position)))
        real = batch.weights > 0
        assert {*np.unique(batch.targets[real])} <= {ord("c"), BYTE.bos}
        assert batch.inputs.max() <= 256 and batch.targets.max() <= 256
        total += int(real.sum())
        begins += int((batch.inputs[:, 0] == BYTE.bos).sum())
        targets += batch.targets[batch.segment_ids > 0].tolist()
    completions = sum(n % 5 + 1 for n in range(1, 40))
    assert total == completions + len(texts) - 1  # with the BOS after each text but the last
    assert sorted(set(targets) - {0}) == [ord("c"), ord("p"), BYTE.bos]
    divided = sum(len(text) + 1 > 24 for text in texts)
    assert begins >= windows.num_windows - 2 * divided


@pytest.mark.parametrize("stored", [False, True])
def test_a_start_token_within_a_conversation_begins_no_document(stored, tmp_path):
    """Windows have whole conversations, and a later turn is in the segment of the first."""
    tokenizer, said = special_tokenizer(), [*TALK[:3], TALK[1]]
    tokenizer.save(tmp_path / "tokenizer")
    turns = "{% for m in messages %}{{ bos_token if m.role == 'user' }}{{ m.content }}{% endfor %}"
    (tmp_path / "tokenizer/chat_template.jinja").write_text(turns)
    rows = [{"messages": [{"role": "user", "content": f"{n:03}"}, *said[1:]]} for n in range(40)]
    source, spec = write(tmp_path / "a.jsonl", rows), str(tmp_path / "tokenizer")
    if stored:
        how = {"kind": "messages", "eval_fraction": 0.2, "workers": 1}
        prepare(source, spec, tmp_path / "store", **how)
        source = str(tmp_path / "store")
    length = 2 + len("000Yes?GoYes?")
    changes = {"data.source": source, "data.seq_len": 2 * length, "train.batch_size": 2}
    changes |= {"data.format": "messages", "data.tokenizer": spec, "data.eval_fraction": 0.2}
    config = overrides.apply(
        presets.run("rmt-tiny"), changes | {"model.vocab_size": tokenizer.vocab_size}
    )
    batch = load_datasets(config, load_tokenizer(spec)).train.batch_at(0)
    np.testing.assert_array_equal(batch.segment_ids, [np.repeat([1, 2], length)] * 2)
    starts = batch.inputs == tokenizer.bos
    assert starts.sum(axis=1).tolist() == [4, 4] and starts[:, [0, length]].all()


def test_the_token_after_a_conversation_has_no_loss():
    assert first_token(BYTE, "messages") == BYTE.bos | CONTEXT
    assert first_token(BYTE, "completion") == first_token(BYTE, "text") == BYTE.bos


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def completions(count=60):
    return [{"prompt": f"{n} is ", "completion": "even" if n % 2 else "odd"} for n in range(count)]


def conversations(count=60):
    return [{"messages": [{"role": "user", "content": str(n)}, TALK[1]]} for n in range(count)]


@pytest.mark.parametrize("kind", ["messages", "completion"])
def test_a_store_has_the_tokens_of_a_run_in_memory(kind, tmp_path):
    """Both have equal documents and marks, whole windows, and the template for the server."""
    rows = {"messages": conversations, "completion": completions}[kind]()
    source = write(tmp_path / "a.jsonl", rows)
    (tmp_path / "chat.jinja").write_text(MARKING)
    template = str(tmp_path / "chat.jinja") if kind == "messages" else ""
    how = {"kind": kind, "chat_template": template, "eval_fraction": 0.2}
    prepare(source, "byte", tmp_path / "store", workers=1, part_bytes=500, **how)
    store = open_store(str(tmp_path / "store"))
    assert store.has_marks and store.train.num_documents + store.held_out.num_documents == 60
    found = documents(source, kind=kind, template=find_template(kind, BYTE, template, "format"))
    texts = set(found)
    for stream in (store.train, store.held_out):
        tokens = stream.read(np.array([0]), len(stream))[0]
        own = [BYTE.decode(stream.document(n)) for n in range(stream.num_documents)]
        assert set(own) <= texts
        ordered = [text for text in found if text in set(own)]
        packed = pack(ordered, BYTE, kind)
        np.testing.assert_array_equal(tokens, packed.tokens)
        np.testing.assert_array_equal(stream.bounds(), packed.bounds)
    changes = {"data.source": store.url, "data.seq_len": 32, "train.batch_size": 2}
    config = overrides.apply(presets.run("rmt-tiny"), changes | {"model.vocab_size": 257})
    batch = load_datasets(config, BYTE).train.batch_at(0)
    assert (batch.inputs[:, 0] == BYTE.bos).all() and 0 < batch.weights.mean() < 0.7
    if kind == "messages":
        saved = chat_template_of(config, BYTE)
        assert saved.render(TALK) == read_template(open_folder(tmp_path / "store"), BYTE).render(
            TALK
        )
        (tmp_path / "store/tokenizer_config.json").unlink()
        prepare(source, "byte", tmp_path / "store", workers=1, part_bytes=500, **how)
        again = read_template(open_folder(tmp_path / "store"), BYTE)
        assert again is not None and again.json() == saved.json()
        (tmp_path / "chat.jinja").write_text(PLAIN)
        with pytest.raises(UsageError, match="the chat template has changed"):
            prepare(source, "byte", tmp_path / "store", workers=1, part_bytes=500, **how)
    else:
        with pytest.raises(UsageError, match="format completion is now text"):
            prepare(source, "byte", tmp_path / "store", workers=1, text_field="prompt")


def test_a_store_of_plain_text_has_no_marks_for_another_format(tmp_path):
    source = write(tmp_path / "a.jsonl", [{"text": f"{n} is a number"} for n in range(60)])
    prepare(source, "byte", tmp_path / "store", workers=1, part_bytes=500, eval_fraction=0.2)
    changes = {"data.source": str(tmp_path / "store"), "data.seq_len": 32, "model.vocab_size": 257}
    config = overrides.apply(presets.run("rmt-tiny"), changes | {"train.batch_size": 2})
    load_datasets(config, BYTE)
    with pytest.raises(UsageError, match="^--data=.* with --format=text, so .*=completion$"):
        load_datasets(overrides.apply(config, {"data.format": "completion"}), BYTE)


def test_a_text_without_answers_is_refused(tmp_path, monkeypatch):
    """A text without answers is refused when a store is prepared, and when a run trains on it."""
    source = write(tmp_path / "a.jsonl", [{"messages": [TALK[0], TALK[2]]}] * 60)
    (tmp_path / "chat.jinja").write_text(PLAIN)
    how = {"kind": "messages", "chat_template": str(tmp_path / "chat.jinja"), "workers": 1}
    said = "no token to train on has a loss; legal: text with messages of the role assistant"
    with pytest.raises(UsageError, match=f"^--input='{source}': {said}.*, in another --output$"):
        prepare(source, "byte", tmp_path / "store", **how)
    assert not (tmp_path / "store/manifest.json").exists()
    changes = {"data.seq_len": 32, "data.chat_template": how["chat_template"]}
    changes |= {"data.format": "messages", "model.vocab_size": 257, "data.eval_fraction": 0.2}
    config = overrides.apply(presets.run("rmt-tiny"), changes)
    monkeypatch.setattr(prepare_module, "any_loss", lambda stream: True)
    prepare(source, "byte", tmp_path / "old", **how)
    good = write(tmp_path / "good.jsonl", conversations())
    for text in source, str(tmp_path / "old"):
        with pytest.raises(UsageError, match=f"^--data={text}: {said}"):
            load_datasets(overrides.apply(config, {"data.source": text}), BYTE)
        mixed = lambda share, text=text: overrides.apply(
            config,
            {
                "data.mixture": [
                    {"source": text, "share": share},
                    {"source": good, "share": 1 - share},
                ]
            },
        )
        with pytest.raises(UsageError, match=f"^--mixture: {text}: {said}"):
            load_datasets(mixed(0.5), BYTE)
        assert len(load_datasets(mixed(0.0), BYTE).mixed) == 2


def test_a_loss_is_found_wherever_it_is():
    tokens = np.full(2**17 + 2, CONTEXT, np.int32)
    tokens[[0, -1]] = 3  # the first token is no target
    stream = StreamInMemory(tokens)
    assert any_loss(stream) and not any_loss(stream, len(tokens) - 1)
    bounds = np.array([0, 2**17, len(tokens)])
    windows = Windows(
        tokens, seq_len=2**17, batch_size=1, bos=0, seed=0, shuffle=False, bounds=bounds
    )
    assert windows.num_windows == 2 and windows.any_loss(3) and not windows.any_loss(1)


def test_tables_have_the_same_documents(tmp_path):
    import pyarrow
    import pyarrow.parquet

    template = ChatTemplate(PLAIN, BYTE)
    for kind, rows in (("messages", conversations(5)), ("completion", completions(5))):
        lines = documents(write(tmp_path / "a.jsonl", rows), kind=kind, template=template)
        with_null = [*rows, dict.fromkeys(rows[0])]
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(with_null), tmp_path / "a.parquet", row_group_size=2
        )
        found = documents(str(tmp_path / "a.parquet"), kind=kind, template=template)
        assert found == lines and [t.pieces for t in found] == [t.pieces for t in lines]
    with pytest.raises(UsageError, match="no column 'messages' of lists; columns: 'prompt' "):
        documents(str(tmp_path / "a.parquet"), kind="messages", template=template)


def test_absent_fields_of_messages_do_not_reach_the_template(tmp_path):
    """All messages of a table have the fields that any of them has, with null for the others."""
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"messages": [{"role": "user", "content": "a", "name": None, "tools": []}]},
        {"messages": [{"role": "user", "content": "b", "name": "B", "tools": ["x"]}]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    template = ChatTemplate("{% for m in messages %}{{ m | tojson }}{% endfor %}", BYTE)
    wanted = ['{"role": "user", "content": "a"}', json.dumps(rows[1]["messages"][0])]
    for source in (str(tmp_path / "a.parquet"), write(tmp_path / "a.jsonl", rows)):
        found = documents(source, kind="messages", template=template)
        assert [json.loads(text) for text in found] == [json.loads(text) for text in wanted]


def test_times_bytes_and_decimals_of_a_table_are_texts(tmp_path):
    import pyarrow
    import pyarrow.parquet

    more = {"at": datetime.datetime(2024, 5, 1, 12), "raw": "é".encode(), "cost": Decimal("1.50")}
    rows = [{"messages": [{"role": "user", "content": "a", **more, "in": {"day": more["at"]}}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    shows = "{% for m in messages %}{{ m.at }}|{{ m.raw }}|{{ m.cost }}|{{ m.in.day }}{% endfor %}"
    template = ChatTemplate(shows, BYTE)
    found = documents(str(tmp_path / "a.parquet"), kind="messages", template=template)
    assert found == ["2024-05-01 12:00:00|é|1.50|2024-05-01 12:00:00"]


WRONG = {
    '{"text": "a"}': 'no field "messages" that is a list of objects with a role and a content',
    '{"messages": []}': 'no field "messages"',
    '{"messages": [{"role": "user"}]}': 'no field "messages"',
    '{"messages": [{"role": "user", "content": "\\ud800"}]}': "an unpaired surrogate",
    "[": "is not JSON",
}


@pytest.mark.parametrize("line", WRONG)
def test_lines_that_are_no_conversations(line, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=WRONG[line]):
        documents(str(path), kind="messages", template=ChatTemplate(PLAIN, BYTE))


def test_sources_and_templates_that_do_not_fit(tmp_path):
    with pytest.raises(UsageError, match="has no fields; legal .* completion: .jsonl"):
        documents("stdlib", kind="completion")
    source = write(tmp_path / "a.jsonl", [{"prompt": "a", "completion": 3}])
    with pytest.raises(UsageError, match='no field "completion" that is a string'):
        documents(source, kind="completion")
    with pytest.raises(UsageError, match="--format=messages: the tokenizer byte has no chat"):
        find_template("messages", BYTE, "", "format")
    with pytest.raises(UsageError, match="/x cannot be read"):
        find_template("messages", BYTE, f"{tmp_path}/x", "format")
    (tmp_path / "damaged").write_text("{% for %}")
    with pytest.raises(UsageError, match="damaged"):  # before a document is read
        find_template("messages", BYTE, f"{tmp_path}/damaged", "format")
    with pytest.raises(UsageError, match="^--chat_template: a{300} cannot be read: File name too"):
        find_template("messages", BYTE, "a" * 300, "format")
    refuses = ChatTemplate("{{ raise_exception('no') }}", BYTE)
    source = write(tmp_path / "b.jsonl", conversations(1))
    with pytest.raises(UsageError, match="cannot be rendered: the chat template refuses"):
        documents(source, kind="messages", template=refuses)
    renamed = write(tmp_path / "c.jsonl", [{"talk": conversations(1)[0]["messages"]}])
    found = documents(
        renamed, text_field="talk", kind="messages", template=ChatTemplate(PLAIN, BYTE)
    )
    assert found == ["u:0;a:Yes?;"]

"""Lines of data as documents with the harness's prompts, and these as requests."""

import gzip
import json
import math

import numpy as np
import pytest

from rmt_tpu.data import ByteTokenizer
from rmt_tpu.data.prepare import prepare
from rmt_tpu.errors import UsageError
from rmt_tpu.evaluation.documents import (
    Source,
    Total,
    ask,
    available_tasks,
    find_tasks,
    metrics,
    read_task,
    read_texts,
    rolling,
)
from rmt_tpu.evaluation.tasks import TASKS, Document, whole_text

ARC = {"question": "Why?", "choices": {"text": ["so", "not"], "label": ["A", "B"]}}
HELLASWAG = {"activity_label": "Roof", "ctx_a": "A man  sits.", "ctx_b": "he", "label": "1"}
LINES = [
    ("arc_easy", ARC | {"answerKey": "B"}, "Question: Why?\nAnswer:", (" so", " not"), 1),
    (
        "arc_challenge",
        {"query": "Question: Why?", "choices": ["so", "not"], "gold": 0},
        "Question: Why?\nAnswer:",
        (" so", " not"),
        0,
    ),
    (
        "hellaswag",
        HELLASWAG | {"endings": ["goes [x] up [title] End", "is", "no"]},
        "Roof: A man sits. He",
        (" goes up. End", " is", " no"),
        1,
    ),
    (
        "piqa",
        {"goal": "To cut", "sol1": "use it", "sol2": "wait", "label": 1},
        "Question: To cut\nAnswer:",
        (" use it", " wait"),
        1,
    ),
    ("lambada_openai", {"text": "I said no"}, "I said", (" no",), 0),
    ("lambada_standard", {"context": "I said", "continuation": "no"}, "I said", (" no",), 0),
]


@pytest.mark.parametrize("task, line, context, continuations, gold", LINES)
def test_prompts_are_the_harness_s(task, line, context, continuations, gold):
    document = TASKS[task].document(line)
    assert document.pairs == tuple((context, c) for c in continuations)
    assert document.gold == gold
    if TASKS[task].kind == "choices":
        assert document.lengths == tuple(len(c) - 1 for c in continuations)


def test_two_beginnings_of_one_ending():
    line = {"sentence": "The _ fell. ", "option1": "cup", "option2": "sun", "answer": "2"}
    document = TASKS["winogrande"].document(line)
    assert document == Document((("The cup", " fell."), ("The sun", " fell.")), 1)


def test_pages_of_wikitext_are_made_ready_and_counted_as_they_were():
    page = ' = A = \n He said , " go " ( 3 @,@ 000 ) N \'s \n'
    document = TASKS["wikitext"].document({"page": page})
    assert document.pairs == (("", ' = A =\nHe said, "go" (3,000) 1\'s\n'),)
    assert (document.words, document.bytes) == (18, len(page))


WRONG = [
    ("arc_easy", "{", "line 2: the line is not JSON"),
    (
        "arc_easy",
        ARC,
        "line 2: the line has no text field 'answerKey'; it has the fields: 'question', 'choices'",
    ),
    ("arc_easy", ARC | {"answerKey": "C"}, "'answerKey'='C'; legal: one of the labels"),
    ("piqa", {"query": "a", "choices": ["b"], "gold": 0}, "no field 'choices' with a list of"),
    ("piqa", {"query": "a", "choices": ["b", "c"], "gold": 2}, "has 'gold'=2; legal: 0 to 1"),
    ("winogrande", {"sentence": "a"}, "the field 'sentence' has no '_'"),
    ("winogrande", {"sentence": "_", "answer": 3}, "has 'answer'=3; legal: '1' or '2'"),
    ("lambada_openai", {"text": "word"}, "has a 'text' of one word"),
]


@pytest.mark.parametrize("task, line, message", WRONG)
def test_a_malformed_line_is_told_with_its_place(tmp_path, task, line, message):
    good = {
        "arc_easy": LINES[0][1],
        "piqa": LINES[3][1],
        "winogrande": {"sentence": "a _ b", "option1": "c", "option2": "d", "answer": "1"},
        "lambada_openai": {"text": "a b"},
    }[task]
    bad = line if isinstance(line, str) else json.dumps(line)
    (tmp_path / f"{task}.jsonl").write_text(json.dumps(good) + "\n" + bad + "\n")
    with pytest.raises(UsageError, match=f"--data_dir='.*{task}.jsonl' line 2: .*legal: ") as error:
        read_task(TASKS[task], str(tmp_path))
    assert message in str(error.value)
    assert len(read_task(TASKS[task], str(tmp_path), limit=1).documents) == 1


def test_data_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"has no piqa.jsonl \(.gz or .zst\); legal: a folder"):
        read_task(TASKS["piqa"], str(tmp_path))
    (tmp_path / "piqa.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="piqa has no documents"):
        read_task(TASKS["piqa"], str(tmp_path))
    with pytest.raises(UsageError, match="'arc_esay' is unknown; did you mean 'arc_easy'"):
        find_tasks(["arc_esay"])
    with pytest.raises(UsageError, match="repeats a name"):
        find_tasks(["piqa", "piqa"])


def test_a_folder_that_cannot_be_looked_up_is_told(tmp_path):
    """A link to itself stands for a folder that this user may not enter."""
    (tmp_path / "loop").symlink_to("loop")
    folder = str(tmp_path / "loop")
    for read in (
        lambda: read_task(TASKS["piqa"], folder),
        lambda: available_tasks(["piqa"], folder),
    ):
        with pytest.raises(UsageError, match="'.*/piqa.jsonl' cannot be read: Too many levels of"):
            read()


def test_compressed_data_is_the_same_documents_with_a_digest_of_its_own(tmp_path):
    for folder, write in (("a", open), ("b", gzip.open)):
        (tmp_path / folder).mkdir()
        name = f"arc_easy.jsonl{'.gz' if folder == 'b' else ''}"
        with write(tmp_path / folder / name, "wt") as file:
            file.write(json.dumps(LINES[0][1]))
    one, other = (read_task(TASKS["arc_easy"], str(tmp_path / f)) for f in "ab")
    assert one.documents == other.documents and one.digest != other.digest
    assert read_task(TASKS["arc_easy"], str(tmp_path / "a"), limit=1).digest != one.digest


def test_windows_over_a_text_score_each_token_once():
    """The harness's example: "-" is the start token."""
    text = lambda tokens: "".join("-0123456789"[token] for token in tokens)
    tokens = np.arange(11, dtype=np.int32)
    windows = lambda *sizes: [tuple(map(text, window)) for window in rolling(tokens, *sizes)]
    assert windows(4, 4) == [("-", "0123"), ("3", "4567"), ("567", "89")]
    assert windows(4, 2) == [("-", "0123"), ("123", "45"), ("345", "67"), ("567", "89")]
    assert windows(20, 20) == [("-", "0123456789")]
    assert list(rolling(tokens[:1], 4, 4)) == []


def test_spaces_that_end_a_context_belong_to_the_continuation():
    source = Source("x", "choices", [Document((("a b  ", "c"), ("a", " d")), 0, (1, 1))], "")
    asked = ask(source, ByteTokenizer(), 10, None)
    told = [(bytes(r.context[1:].tolist()), bytes(r.continuation.tolist())) for r in asked.requests]
    assert told == [(b"a b", b"  c"), (b"a", b" d")]
    assert all(r.context[0] == ByteTokenizer.bos for r in asked.requests)
    nothing = source._replace(documents=[Document((("a", ""), ("a", "b")), 0)])
    with pytest.raises(UsageError, match="continuation '' adds no token"):
        ask(nothing, ByteTokenizer(), 10, None)


def test_texts_without_a_token_are_told_by_their_flag():
    for task, flag in ((TASKS["wikitext"], "--eval_tasks=wikitext"), (None, "--text")):
        source = Source("wikitext", "text", [whole_text("")], "", task)
        with pytest.raises(UsageError, match=f"^{flag} has no tokens to score; legal: "):
            ask(source, ByteTokenizer(), 10, None, flag="eval_tasks")


def test_a_stride_above_the_window_is_refused():
    source = Source("text", "text", [whole_text("abc" * 20)], "")
    requests = ask(source, ByteTokenizer(), 8, 8).requests
    assert max(len(request.continuation) for request in requests) == 8
    message = r"^--stride=9 is more than the 8 tokens that tiny reads at once .*; legal: 1 to 8$"
    with pytest.raises(UsageError, match=message):
        ask(source, ByteTokenizer(), 8, 9, model="tiny")


def test_a_text_without_a_start_token_where_the_tokenizer_puts_none():
    """Something is before what is scored all the same, as in the harness."""
    tokenizer = ByteTokenizer()
    tokenizer.starts = False
    source = Source("x", "choices", [Document((("ab", " c"), ("", "d")), 0, (1, 1))], "")
    asked = ask(source, tokenizer, 10, None)
    assert [r.context.tolist() for r in asked.requests] == [[97, 98], [tokenizer.bos]]
    (window,) = ask(Source("text", "text", [whole_text("ab")], ""), tokenizer, 4, None).requests
    assert window.context.tolist() == [tokenizer.bos] and window.continuation.tolist() == [97, 98]


def test_what_choices_give():
    """By the sum, and by the sum over the characters of the choice; the first of equals."""
    choices = lambda gold: Document((("q", " a"), ("q", " bcde"), ("q", " f")), gold, (1, 4, 1))
    source = Source("x", "choices", [choices(0), choices(1), choices(2)], "")
    asked = ask(source, ByteTokenizer(), 10, None)
    logs = [-1.0, -1.5, -2.0, -2.5, -3.0, -1.0, -2.0, -4.0, -2.0]
    acc, acc_norm, bits = metrics(asked, [Total(log, False) for log in logs])
    assert acc.name == "acc" and acc.total.tolist() == [1, 0, 0]
    assert acc_norm.name == "acc_norm" and acc_norm.total.tolist() == [0, 1, 0]
    assert bits.name == "gold_bits_per_byte"
    assert bits.value == pytest.approx((1 + 3 + 2) / (2 + 5 + 2) / math.log(2))


def test_what_last_words_give():
    source = Source("x", "last_word", [Document((("a", " b"),)), Document((("a", " c"),))], "")
    asked = ask(source, ByteTokenizer(), 10, None)
    perplexity, acc = metrics(asked, [Total(-1.0, False), Total(-3.0, True)])
    assert perplexity.value == pytest.approx(math.exp(2)) and acc.value == 0.5


def test_what_texts_give_in_three_units():
    texts = [whole_text("ab cd"), whole_text("efgh ij kl")]
    source = Source("text", "text", texts, "")
    asked = ask(source, ByteTokenizer(), 4, None)
    assert asked.owners.tolist() == [0, 0, 1, 1, 1]
    found = {m.name: m.value for m in metrics(asked, [Total(-float(n), False) for n in range(5)])}
    assert found == {
        "word_perplexity": pytest.approx(math.exp(10 / 5)),
        "byte_perplexity": pytest.approx(math.exp(10 / 15)),
        "bits_per_byte": pytest.approx(10 / 15 / math.log(2)),
        "token_perplexity": pytest.approx(math.exp(10 / 15)),
    }
    # A single text's windows are what its error is of.
    asked = ask(source._replace(documents=texts[1:]), ByteTokenizer(), 4, None)
    word, *_, token = metrics(asked, [Total(-3.0, False), Total(-4.0, False), Total(-5.0, False)])
    assert word.value == pytest.approx(math.exp(12 / 3)) and token.weight.tolist() == [4, 4, 2]
    assert word.error > 0


def test_texts_are_files_of_training_s_kinds(tmp_path):
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\ntwo words\n")
    source = read_texts(str(tmp_path / "*.txt"), ByteTokenizer())
    assert [d.words for d in source.documents] == [2, 3]
    with pytest.raises(UsageError, match="--text='.*b.txt'"):
        read_texts(str(tmp_path / "b.txt"), ByteTokenizer())


def test_a_store_of_completions_is_no_text(tmp_path):
    """Its texts would be scored with their prompts, and without special tokens."""
    lines = [json.dumps({"prompt": f"{n}", "completion": "a"}) for n in range(9)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    how = {"eval_fraction": 0.5, "workers": 1}
    source, stores = str(tmp_path / "a.jsonl"), [str(tmp_path / name) for name in "xy"]
    prepare(source, "byte", stores[0], kind="completion", **how)
    with pytest.raises(UsageError, match="--text=.*x is a token store of .* completions"):
        read_texts(stores[0], ByteTokenizer())
    prepare(source, "byte", stores[1], text_field="prompt", **how)
    assert read_texts(stores[1], ByteTokenizer()).documents


def test_a_store_of_another_tokenizer_is_refused_in_words_of_this_recipe(tmp_path):
    class Other(ByteTokenizer):
        name = "runs/a/tokenizer.json"

        def fingerprint(self) -> str:
            return "another"

    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(f"text {n}" for n in range(9)))
    store = str(tmp_path / "store")
    prepare(str(tmp_path / "a.txt"), "byte", store, eval_fraction=0.5, workers=1)
    with pytest.raises(UsageError) as error:
        read_texts(store, Other(), "the model in runs/a")
    assert str(error.value) == (
        f"--text={store} was made with the tokenizer byte (257 tokens), but the model in runs/a "
        "has runs/a/tokenizer.json (257 tokens); legal: text files, or a store of that tokenizer"
    )
    (tmp_path / "store/manifest.json").unlink()
    with pytest.raises(UsageError, match=f"^--text={store} is not complete; "):
        read_texts(store, Other())

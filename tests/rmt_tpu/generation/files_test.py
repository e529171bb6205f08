"""Files of prompts, and files to which samples are appended."""

import json
import os
import socket
import time

import pytest

from rmt_tpu.errors import UsageError
from rmt_tpu.generation import Sampling
from rmt_tpu.generation.files import (
    Output,
    check_same,
    is_same_file,
    open_output,
    read_prompts,
    text_settings,
)

# Characters at which str.splitlines splits, although they end no line of a file.
SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"
PROMPT = "one" + "two".join(SEPARATORS)
DEEP = 100_000 * "[" + 100_000 * "]"
SETTINGS = text_settings(Sampling(), [], "48-a", 2)
LINE = {"number": 0, "sample": 0, "prompt": PROMPT, "text": SEPARATORS} | SETTINGS


def written(path, *lines) -> Output:
    """Return an output whose file has these lines."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return Output(str(path))


def test_only_newlines_end_lines_of_prompts(tmp_path):
    (tmp_path / "in.txt").write_bytes(f"{PROMPT}\r\n\nlast".encode())
    assert read_prompts(str(tmp_path / "in.txt")) == [PROMPT, "", "last"]
    line = json.dumps({"prompt": PROMPT}, ensure_ascii=False)
    (tmp_path / "in.jsonl").write_bytes(f"{line}\n{line}\r\n".encode())
    assert read_prompts(str(tmp_path / "in.jsonl")) == [PROMPT, PROMPT]
    (tmp_path / "empty.txt").write_bytes(b"")
    assert read_prompts(str(tmp_path / "empty.txt")) == []


def test_prompts_are_read_like_training_text(tmp_path):
    """A byte order mark is no part of the first prompt, and a blank line of .jsonl no prompt."""
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbfone\n \ntwo\n")
    assert read_prompts(str(tmp_path / "in.txt")) == ["one", " ", "two"]
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\n\n  \n{"prompt": "two"}\n')
    assert read_prompts(str(tmp_path / "in.jsonl")) == ["one", "two"]


def test_nested_prompts_are_refused(tmp_path):
    (tmp_path / "in.jsonl").write_text(f'{{"prompt": "a"}}\n{DEEP}\n')
    with pytest.raises(UsageError, match="in.jsonl:2 is not a JSON object"):
        read_prompts(str(tmp_path / "in.jsonl"))


def test_a_sample_with_any_characters_is_found_again(tmp_path):
    path = str(tmp_path / "out.jsonl")
    Output(path).add(LINE, LINE | {"sample": 1})
    assert check_same(Output(path), [PROMPT], SETTINGS) == {(0, 0), (0, 1)}


@pytest.mark.parametrize(
    "line",
    [{"number": "7"}, {"number": -1}, {"number": True}, {"number": 0.0}, {}, [], DEEP, "my notes"],
    ids=lambda line: str(line)[:20],
)
def test_lines_of_another_command_are_refused(tmp_path, line):
    with pytest.raises(UsageError, match="out.jsonl:2 is not a line that this command writes"):
        written(tmp_path / "out.jsonl", LINE, line)


def test_only_interrupted_lines_are_passed_over(tmp_path):
    """Also as the last line, which has no end yet."""
    path = tmp_path / "out.jsonl"
    whole = json.dumps(LINE)
    assert written(path, whole[:30], "", '{"nu', LINE).lines == [LINE]
    for last, is_ours in ((whole[:12], True), ('{"n', True), ("notes", False), ("{}", False)):
        path.write_text(f"{whole}\n{last}", encoding="utf-8")
        if is_ours:
            assert Output(str(path)).lines == [LINE]
            continue
        with pytest.raises(UsageError, match="out.jsonl:2 is not a line that this command writes"):
            Output(str(path))
        assert path.read_text(encoding="utf-8") == f"{whole}\n{last}"


def test_a_last_line_that_lacks_only_its_end_counts(tmp_path):
    path, second = tmp_path / "out.jsonl", LINE | {"sample": 1}
    written(path, LINE, second)
    path.write_bytes(path.read_bytes()[:-1])
    output = Output(str(path))
    assert output.lines == [LINE, second]
    output.add(LINE | {"number": 5})
    assert Output(str(path)).lines == [LINE, second, LINE | {"number": 5}]


def test_a_file_that_another_process_appends_to_is_refused(tmp_path):
    path, word = tmp_path / "out.jsonl", tmp_path / "out.jsonl.running.json"
    with open_output(str(path), pytest.fail) as output:
        assert json.loads(word.read_text())["pid"] == os.getpid()
        output.add(LINE)
    assert not word.exists()
    record = {"host": socket.gethostname(), "pid": os.getppid(), "seen": time.time()}
    word.write_text(json.dumps(record))
    with (
        pytest.raises(UsageError, match=f"^{path} is in use by process {os.getppid()} on "),
        open_output(str(path), pytest.fail),
    ):
        pass
    word.write_text(json.dumps(record | {"host": "elsewhere"}))
    told = []
    with open_output(str(path), told.append) as output:
        assert output.lines == [LINE]
    assert len(told) == 1 and f"also seems to write to {path}; if it does, stop one" in told[0]


def test_the_same_file_by_another_path(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    assert is_same_file(f"{tmp_path}/a.txt", f"{tmp_path}/link/a.txt")
    assert not is_same_file(f"{tmp_path}/a.txt", f"{tmp_path}/b.txt")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model": "48-b"}, "samples with model='48-b', and this command has '48-a'; legal"),
        ({"stop": ["."]}, r"samples with --stop=\['.'\], and this command has \[\]; legal"),
        ({"top_k": 3}, "samples with --top_k=3, and this command has 0; legal"),
        # The seeds of samples depend on it, so that two prompts could get the same one.
        ({"num_samples": 3}, "samples with --num_samples=3, and this command has 2; legal"),
        ({"logprobs": [-0.5]}, "samples with --logprobs, and this command has new ones without"),
        ({"prompt": "x"}, "samples of other prompts, such as 'x'; legal"),
        ({"number": 1}, "samples of other prompts"),
        ({"prompt": None}, "has lines that are no samples of prompts; legal"),
        ({"sample": [0]}, "has lines that are no samples of prompts; legal"),
        ({"sample": -1}, "has lines that are no samples of prompts; legal"),
        # Two commands that ran at the same time wrote it.
        ({"text": "b"}, 'has two lines with "number": 0 and "sample": 0; legal: a single line'),
    ],
)
def test_samples_of_another_command_are_refused(tmp_path, change, words):
    output = written(tmp_path / "out.jsonl", LINE, LINE | change)
    with pytest.raises(UsageError, match=f"^{output.location} .*{words}"):
        check_same(output, [PROMPT], SETTINGS)


def test_log_probabilities_are_in_all_lines_or_none(tmp_path):
    output = written(tmp_path / "out.jsonl", LINE | {"logprobs": []})
    assert check_same(output, [PROMPT], SETTINGS, logprobs=True) == {(0, 0)}
    with pytest.raises(UsageError, match="samples without --logprobs, and .* with it; legal: the"):
        output = written(tmp_path / "out.jsonl", LINE)
        check_same(output, [PROMPT], SETTINGS, logprobs=True)


def test_lines_of_an_older_version_count(tmp_path):
    """Most new settings pass for the present ones; one of `Sampling` has its default."""
    new = ("model", "stop", "num_samples", "min_p")
    old = {name: value for name, value in LINE.items() if name not in new}
    output = written(tmp_path / "out.jsonl", old)
    others = text_settings(Sampling(), ["."], "9-b", 3)
    assert (
        check_same(output, [PROMPT], SETTINGS) == check_same(output, [PROMPT], others) == {(0, 0)}
    )
    with pytest.raises(UsageError, match="samples with --min_p=0.0, and this command has 0.5"):
        check_same(output, [PROMPT], SETTINGS | {"min_p": 0.5})

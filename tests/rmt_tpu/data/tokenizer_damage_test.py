"""Files of tokenizers that cannot be: one line, which names where they are from."""

import json

import pytest
import tokenizers
from tokenizers import models

from rmt_tpu.data import load_saved, load_tokenizer
from rmt_tpu.data.tokenizer_files import is_there
from rmt_tpu.errors import UsageError

END = "<|endoftext|>"


def refusal(call, *arguments) -> str:
    with pytest.raises(UsageError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "the tokenizer cannot be read ("),
        (b"{}", "the tokenizer cannot be loaded ("),
        (b"[" * 100_000, "the tokenizer cannot be read (maximum recursion depth"),
        (b'{"a":' * 100_000, "the tokenizer cannot be read (maximum recursion depth"),
        (b"9" * 5000, "the tokenizer cannot be read ("),
    ],
    ids=["half", "empty", "deep list", "deep object", "5000 digits"],
)
def test_a_damaged_file_is_named_by_what_a_person_gave(tmp_path, content, said):
    """By the flag if one named it, and else, in a run's folder, as the file that it is."""
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    for spec in file, tmp_path:
        assert refusal(load_tokenizer, str(spec)).startswith(f"--tokenizer={str(spec)!r}: {said}")
    assert refusal(load_saved, tmp_path).startswith(f"{tmp_path}: tokenizer.json: {said}")


def test_a_place_that_cannot_be_looked_up_is_told(tmp_path):
    """A name that is too long stands for a folder that this user may not enter."""
    long = f"{tmp_path}/{'a' * 300}"
    for spec in long, f"{long}/tokenizer.json":
        assert refusal(load_tokenizer, spec) == (
            f"--tokenizer={spec!r}: the tokenizer cannot be read (File name too long); legal: a "
            "tokenizer.json"
        )
        assert not is_there(spec)


def test_a_file_without_a_bos_in_a_folder_of_a_run_is_named(tmp_path):
    tokenizers.Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    message = refusal(load_saved, tmp_path)
    begins = f"{tmp_path}: tokenizer.json: the vocabulary has no token that starts"
    assert message.startswith(begins)


@pytest.mark.parametrize("token", [99999999999999, 2**32 + 7, 2**31, 2**24])
def test_an_id_that_no_vocabulary_needs_is_refused(tmp_path, token):
    """The library takes 2^32 and more modulo 2^32."""
    (tmp_path / "encoder.json").write_text(json.dumps({END: 0, "a": 1, "b": token}))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    message = refusal(load_tokenizer, str(tmp_path))
    assert f"token 'b' has the id {token}, which is out of range; legal: 0 to 16777215" in message


def test_so_it_is_in_a_tokenizer_json(tmp_path):
    file = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(models.BPE({END: 0, "a": 1}, [])).save(str(file))
    # Not by the library, which counts up to it.
    file.write_text(file.read_text().replace('"a": 1', f'"a": {2**31}'))
    message = refusal(load_tokenizer, str(tmp_path))
    assert f"token 'a' has the id {2**31}, which is out of range" in message

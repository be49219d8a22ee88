"""What several files of tests of runs begin with."""

from pathlib import Path

import pytest
from published_models import with_tokenizer, write


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text of words that the tokenizer of tests/published_models.py has."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("the cat sat on the mat and the dog ran\n" * 100)
    return str(path)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of the family llama in several files, and its tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    return with_tokenizer(write("llama", "sharded safetensors", "bfloat16", directory))

"""One small generated corpus, tokenised once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from bailing_mtp.data.shards import TokenShards, open_shards
from bailing_mtp.data.sources import BadLines, Document, GeneratedSource, Source, open_source
from bailing_mtp.data.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def corpus() -> GeneratedSource:
    source = open_source("reasoning_gym:chain_sum,gcd,leg_counting", n_documents=300, seed=3)
    assert isinstance(source, GeneratedSource)
    return source


@pytest.fixture(scope="session")
def corpus_documents(corpus: Source) -> list[Document]:
    return list(corpus.documents(BadLines()))


@pytest.fixture(scope="session")
def tokenizer(corpus_documents: list[Document]) -> Tokenizer:
    return train_tokenizer((document.text for document in corpus_documents), vocab_size=512)


@pytest.fixture(scope="session")
def shards(corpus: Source, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    cache_dir: Path = tmp_path_factory.mktemp("shards")
    return open_shards(corpus, tokenizer, cache_dir)

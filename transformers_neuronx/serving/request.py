"""Requests: what a caller asks for, and how far it is. Plain data; the scheduler moves them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from numbers import Integral
from typing import Any

import numpy as np

from transformers_neuronx.engine.images import Pictured
from transformers_neuronx.engine.kv_cache import Given
from transformers_neuronx.engine.rules import Rules
from transformers_neuronx.errors import InputError
from transformers_neuronx.serving.adapters import HostAdapter
from transformers_neuronx.serving.drafting import Odds
from transformers_neuronx.serving.structured import Parser, StructuredOutputs
from transformers_neuronx.serving.text import TextStream

Array = np.ndarray[Any, Any]
NO_SOURCE = np.zeros(0, np.int32)
Mask = Callable[[list[int]], Array | None]
Logprob = tuple[float, dict[int, float]]  # of a token, and of the likeliest ones in its place
GREEDY = 1e-5  # a temperature; logits that less divides may not be finite
LIKELIEST = 20  # tokens with log-probabilities, at most


@dataclass(frozen=True)
class SamplingParams:
    """How one request is answered.

    - `max_tokens`: most tokens to generate, at least 1. Default 16.
    - `min_tokens`: before this many tokens, none that ends the request is sampled. Default 0.
    - `temperature`: 0 is greedy, and so is less than 1e-5; otherwise divides the logits. Default 1.0.
    - `top_k`, `top_p`, `min_p`, `repetition_penalty`, `seed`: as in `Rules`, with `top_k` 0 (all tokens) by default.
    - `stop_token_ids`: tokens that end the request, besides the model's end tokens.
    - `stop`: strings that end the request as soon as its text has one. They need an engine with a tokenizer.
    - `include_stop_str_in_output`: the text keeps the string that ended it. Default False.
    - `skip_special_tokens`: the text does not have special tokens. It never has the token that ends the request.
      Default True.
    - `ignore_eos`: the model's end tokens do not end the request. Default False.
    - `logit_bias`: added to the logits of these tokens.
    - `presence_penalty`, `frequency_penalty`: subtracted from the logits of generated tokens, once and for each time.
    - `logprobs`: keep the log-probability of each token, and of this many likeliest ones, at most 20. Default None.
    - `prompt_logprobs`: keep the same of each token of the prompt, after those before it. Such a prompt is computed
      whole, also what the cache has of it. Default None.
    - `n`: number of sequences for the prompt, at least 1; see `Handle.choices`. Default 1.
    - `mask`: a function of the list of generated tokens that returns which may come next, pred[vocab], or None if all
      may. The engine's thread calls it. Default None.
    - `structured_outputs`: what the text must be, such as JSON by a schema. The request ends with "stop" as soon as
      nothing can follow. It needs an engine with a tokenizer. Default None.
    - `priority`: requests with a lower number go first. Default 0; equal ones in the order of their arrival.
    - `cache_salt`: requests share cached prompts only with those of the same salt. Default "".
    - `adapter`: the name of an adapter that was loaded with `Engine.load_adapter`. Default: none, the model as it is.

    Raises InputError for a value out of range.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    mask: Mask | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int = 0
    cache_salt: str = ""
    adapter: str | None = None

    def __post_init__(self) -> None:
        for name, least in dict(max_tokens=1, min_tokens=0, logprobs=0, prompt_logprobs=0, n=1).items():
            value, optional = getattr(self, name), name.endswith("logprobs")
            whole = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
            if not (whole or (value is None and optional)):
                raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}")
            if optional and (value or 0) > LIKELIEST:
                raise InputError(f"{name} must be at most {LIKELIEST}, got {value}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise InputError(f"{name} must be from -2 to 2, got {getattr(self, name)!r}")
        if isinstance(self.stop, str) or not all(isinstance(stop, str) and stop for stop in self.stop):
            raise InputError(f"stop must be a list of strings that are not empty, got {self.stop!r}")
        if self.temperature < 0:
            raise InputError(f"temperature must be at least 0 (0 is greedy), got {self.temperature!r}")
        self.rules  # noqa: B018  checks the others

    @property
    def rules(self) -> Rules:
        """The rules of sampling, for a single row; without a seed, they draw differently each time."""
        greedy = self.temperature < GREEDY
        return Rules(
            top_k=1 if greedy else self.top_k,
            top_p=self.top_p,
            temperature=1.0 if greedy else self.temperature,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
        )

    @property
    def adds(self) -> bool:
        """Whether something is added to logits before the rules apply, also where no end token is held back."""
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)

    @property
    def masks(self) -> bool:
        """Whether some tokens may not come."""
        return self.mask is not None or self.structured_outputs is not None

    @property
    def sees_logits(self) -> bool:
        """Whether it must see logits on the devices before or after a token is chosen."""
        kept = self.logprobs, self.prompt_logprobs
        return self.adds or self.masks or self.min_tokens > 0 or any(count is not None for count in kept)


@dataclass(eq=False)
class Request:
    """One sequence on its way.

    `tokens` are those of the prompt, then the generated ones; -1 where only the cache knows the first ones. The keys
    and values of the first `computed` of them are in the cache after all steps that were planned: in the pages of
    `tables`, see `KVCache`, and their states are at the first of `places`. `guesses` are draft tokens after them, which
    a step verifies. A request has ended when it has a `reason`: "stop", "length", "abort" or "error".
    """

    id: int
    tokens: list[int]
    params: SamplingParams
    ends: frozenset[int] = frozenset()  # tokens that end it
    salt: bytes = b""  # requests share pages only with those of the same salt
    source: Array = field(
        default_factory=lambda: NO_SOURCE
    )  # what an encoder reads, if the model has one: s32[·], or f32[*source_sizes]
    adapter: HostAdapter | None = None
    pictured: Pictured | None = None  # images that stand in place of tokens of its prompt
    text: TextStream | None = None
    parser: Parser | None = None
    stream: int = 0  # of random numbers: requests of one seed and prompt differ by it
    rules: InitVar[Array | None] = None  # how its tokens are sampled, s32[POLICY_COLUMNS]; by default as `params` say
    pending: int = 0  # tokens that were sampled in steps whose results nobody has read yet
    row: int = 0  # its place among those that sampled in that step
    given: Given | None = None  # what its caller has filled, up to `computed`
    computed: int = 0
    guesses: list[int] = field(default_factory=list)
    drafted: int = 0  # draft tokens that steps verified
    accepted: int = 0  # generated tokens that were draft tokens
    odds: Odds | None = None  # how often its draft tokens were right, once it had some
    cached: int = 0  # tokens of the prompt that were in the cache when it was first admitted
    tables: list[list[int]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of the full pages of the prompt
    published: int = 0  # those that others may find
    preempted: int = 0  # times that its pages were taken away
    reason: str | None = None
    streamed: bool = False  # whether someone waits for each of its tokens
    pooling: str | None = None  # how last hidden states of its prompt become one vector; then it samples nothing
    pooled: Array | float = 0.0  # their sum so far, f32[·], and then what a score head makes of it, f32[labels]
    labels: int = 0  # of a score head
    error: Exception | None = None  # of what masks its tokens
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)  # the first has nothing before it
    prompt_length: int = field(init=False)
    policy: Array = field(init=False)

    def __post_init__(self, rules: Array | None) -> None:
        self.prompt_length = len(self.tokens)
        self.policy = self.params.rules.packed(1)[0] if rules is None else rules
        if rules is None:
            self.policy[-1] = self.stream
        if self.scores:
            self.prompt_logprobs = [None] * self.prompt_length

    def note(self, logprob: float, likeliest: Sequence[int], theirs: Sequence[float]) -> None:
        """Keep log-probabilities of a sampled token and of the likeliest ones, if the request is to have them."""
        if (count := self.params.logprobs) is not None:
            self.logprobs.append((logprob, dict(zip(likeliest[:count], theirs[:count], strict=True))))

    def note_of_prompt(
        self, position: int, logprob: float, likeliest: Sequence[int], theirs: Sequence[float]
    ) -> None:  # fmt: skip
        """Keep log-probabilities of the prompt's token at a position."""
        count = self.params.prompt_logprobs
        self.prompt_logprobs[position] = logprob, dict(zip(likeliest[:count], theirs[:count], strict=True))

    @property
    def scores(self) -> bool:
        """Whether log-probabilities of its prompt are kept."""
        return self.params.prompt_logprobs is not None

    @property
    def whole(self) -> bool:
        """Whether all tokens of its prompt are computed, also what the cache has of it."""
        return self.scores or self.pooling in ("mean", "cls")

    @property
    def pooled_positions(self) -> tuple[int, int]:
        """The first position of its prompt that is pooled, and the one after the last."""
        length = self.prompt_length
        return dict(cls=(0, 1), last=(length - 1, length)).get(self.pooling or "", (0, length))

    @property
    def embedding(self) -> Array:
        """The pooled hidden states, f32[·], once it has ended."""
        return self._split[0]

    @property
    def logits(self) -> Array:
        """What a score head makes of them, f32[labels]."""
        return self._split[1]

    @property
    def _split(self) -> Sequence[Array]:
        whole = np.asarray(self.pooled) / (self.prompt_length if self.pooling == "mean" else 1)
        return np.split(whole, [len(whole) - self.labels])

    @property
    def penalizes(self) -> bool:
        """Whether its rules depend on the tokens that it has."""
        return self.params.repetition_penalty != 1

    @property
    def adjusts(self) -> bool:
        """Whether logits change before its rules apply."""
        return self.adds or self.params.masks

    @property
    def adds(self) -> bool:
        """Whether something is added to its logits."""
        return self.params.adds or bool(self.ends and self.generated < self.params.min_tokens)

    @property
    def may_run_on(self) -> bool:
        """Whether the devices may generate several of its tokens before anyone sees the first."""
        told = self.streamed or self.adjusts or self.params.logprobs is not None or (self.penalizes and self.pending)
        return not told

    def see(self, seen: Array, guesses: int = 0) -> None:
        """Mark the tokens that it has, and its first draft tokens, in `seen` pred[vocab]."""
        seen[[token for token in self.tokens if token >= 0]] = True
        seen[self.guesses[:guesses]] = True

    def adjust(self, added: Array, guesses: int = 0) -> None:
        """Change what is added to logits after its first draft tokens, f32[vocab], zeros at first."""
        params, generated = self.params, self._generated_with(guesses)
        if params.presence_penalty or params.frequency_penalty:
            ids, counts = np.unique(generated, return_counts=True)
            added[ids.astype(np.int64)] -= params.presence_penalty + params.frequency_penalty * counts
        for token, bias in params.logit_bias.items():
            added[token] += bias
        if len(generated) < params.min_tokens:
            added[list(self.ends)] = -np.inf

    def allow(self, allowed: Array, vocab: int, guesses: int = 0) -> None:
        """Write which of so many tokens may come after its first draft tokens: bits as in `Parser.fill`."""
        if self.parser:
            self.parser.fill(allowed, self.guesses[:guesses])
        if self.params.mask and (mask := self.params.mask(self._generated_with(guesses))) is not None:
            if np.shape(mask) != (vocab,):
                raise InputError(f"a mask must be pred[{vocab}], got {list(np.shape(mask))}")
            bits = np.packbits(np.asarray(mask, bool), bitorder="little")
            allowed.view(np.uint8)[: len(bits)] &= bits

    def _generated_with(self, guesses: int) -> list[int]:
        return self.tokens[self.prompt_length :] + self.guesses[:guesses]

    def contents(self, start: int, count: int) -> dict[int, bytes]:
        """What stands for the content of those of so many tokens that are of images, by position."""
        return self.pictured.contents(start, count) if self.pictured else {}

    def held(self, start: int, end: int) -> list[int | bytes]:
        """Its tokens from `start` up to `end`, as others are compared with them."""
        contents = self.contents(start, end - start)
        return [contents.get(place, token) for place, token in enumerate(self.tokens[start:end], start)]

    def before(self, page: int) -> bytes:
        """What stands for all tokens of the prompt before one of its pages."""
        return self.digests[page - 1] if page else self.salt

    @property
    def order(self) -> tuple[int, int]:
        """Requests with a smaller order go first."""
        return self.params.priority, self.id

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def unknown(self) -> int:
        """Number of first tokens that only the cache knows."""
        return sum(token < 0 for token in self.tokens)

    @property
    def longest(self) -> int:
        """The most positions whose keys and values it can need: the last token's are never read."""
        return self.prompt_length + self.params.max_tokens - 1

    @property
    def known(self) -> int:
        """Number of its tokens, with the pending ones, which only the devices know."""
        return len(self.tokens) + self.pending

    def accept(self, sampled: Sequence[int], rounds: int = 1) -> int:
        """Add what a step sampled: the next token and those after right draft tokens, if it still has these, or the
        tokens of several rounds. Return how many draft tokens were right.
        """
        before = self.accepted
        self.pending -= rounds
        for token in sampled[: rounds - 1]:
            self.append(token)
            if self.reason is not None:
                return 0
        sampled = sampled[rounds - 1 :]
        guesses, self.guesses = self.guesses, []
        self.drafted += len(guesses)
        for token, guess in zip(sampled, [*guesses, None], strict=False):
            self.append(token)
            if self.reason is not None or token != guess:
                break
            self.computed += 1  # the step wrote its key and value
            self.accepted += 1
        del self.logprobs[self.generated :]
        return self.accepted - before

    def append(self, token: int) -> None:
        """Add a generated token, which may complete the request."""
        self.tokens.append(token)
        may_stop = self.generated > self.params.min_tokens
        ended = token in self.ends or (self.text and self.text.add(token, may_stop))
        if ended or (self.parser and self.parser.add(token)):
            self.reason = "stop"
        elif self.generated >= self.params.max_tokens:
            self.reason = "length"

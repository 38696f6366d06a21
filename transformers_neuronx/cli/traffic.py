"""Which requests `bench` sends to a server, and when: options, checked, and what is drawn by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_letters, printable
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from transformers_neuronx.cli import options as o
from transformers_neuronx.cli.load import LIMITED, NEWS, PROMPTS, at_once
from transformers_neuronx.errors import ConfigError

KINDS = ("random", "shared", "sharegpt")
LEAST = 0.001  # of what may be any fraction
PROMPT, NEW = 220, 195  # tokens of `sharegpt`: means before cutting
SIGMA, FEWEST, MOST = 1.0, 4, 1024
WORDS = """
    the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not
    what all were we when your can said there use an each which she do how their if will up other about out many then
    them these so some her would make like him into time has look two more write go see number no way could people my
    than first water been call who its now find long down day did get come made may part over new sound take only little
""".split()  # of about one token each
VARIED = " ".join(
    [
        *WORDS, *map(str.title, WORDS), *map(str.upper, WORDS), *map(str, range(1000)), *printable.strip(),
        *(first + second for first in ascii_letters for second in ascii_letters),
    ]
)  # fmt: skip

Pool = NDArray[np.int64] | NDArray[np.str_]  # of token ids or of words

Load = Annotated[
    str | None,
    o.option(
        "--load",
        help="Prompts: random; shared, which begin alike; or sharegpt, as long as those of conversations.",
        panel=o.SERVER,
        default="random",
    ),
]
Prefixes = Annotated[
    int | None,
    o.option("--prefixes", help="Beginnings that shared prompts have.", panel=o.SERVER, default="10", least=1),
]
Prefix = Annotated[
    int | None, o.option("--prefix", help="Tokens of each, before --prompt.", panel=o.SERVER, default="256", least=1)
]
Rates = Annotated[
    list[float] | None,
    o.option(
        "--rate",
        help="Send this many requests per second, at random times, whether or not others have ended; may be repeated. "
        "If --concurrency is given, it is the most at once.",
        panel=o.SERVER,
        least=LEAST,
    ),
]
Burstiness = Annotated[
    float | None,
    o.option(
        "--burstiness",
        help="Shape of the gamma distribution of times between them: 1 is a Poisson process, less comes in bursts.",
        panel=o.SERVER,
        default="1",
        least=LEAST,
    ),
]
Goodput = Annotated[
    list[str] | None,
    o.option(
        "--goodput",
        help="Also count requests within a limit in ms: ttft:500, tpot:50 or e2el:9000; may be repeated.",
        panel=o.SERVER,
    ),
]
Seed = Annotated[
    int | None, o.option("--seed", help="The same seed draws the same requests.", panel=o.SERVER, default="0", least=0)
]


@dataclass(frozen=True)
class Ask:
    """A request: token ids or text, how many tokens that is, and how many are to be generated."""

    prompt: list[int] | str
    length: int
    new: int


@dataclass(frozen=True)
class Traffic:
    """A load. Each of `prompts` with each of `news`, in tokens, each of `rates` with each of `most`, is a measurement.

    - `requests`: how many are counted in each.
    - `kind`: `random` prompts; `shared` beginnings, `prefixes` of `prefix` tokens, equally often before random ends; or
      `sharegpt`, random prompts whose lengths resemble those of ShareGPT's conversations, where `prompts` and `news`
      are None. Their means, 220 and 195, are about those of ShareGPT's first turns in `vllm bench serve` (230 and 203
      with Llama 3.1 in vLLM's pull request 18566, others a little less). That they are lognormal with a sigma of 1 is
      an assumption. They are cut to 4 … 1024, which leaves means of 208 and 187.
    - `rates`: requests per second, with gaps from a gamma distribution of shape `burstiness`: 1 is a Poisson process,
      less comes in bursts. None sends all at once.
    - `most`: how many may run at once; None is any number.
    - `seed`: the same one draws the same prompts and times.
    - `limits`: ms that a request may take to count in goodput.
    """

    requests: int
    kind: str = "random"
    prompts: Sequence[int | None] = (None,)
    news: Sequence[int | None] = (None,)
    prefixes: int = 10
    prefix: int = 256
    rates: Sequence[float | None] = (None,)
    burstiness: float = 1.0
    most: Sequence[int | None] = (None,)
    seed: int = 0
    limits: Mapping[str, float] = field(default_factory=dict)

    def asks(self, pool: Pool, prompt: int | None, new: int | None, random: np.random.Generator) -> Iterator[Ask]:
        """Yield the requests of a measurement, and one more to send before it. Prompts are drawn from a pool."""
        count = self.requests + 1
        begins = random.choice(pool, (self.prefixes, self.prefix)).tolist() if self.kind == "shared" else [[]]
        turns = random.permutation(np.arange(count) % len(begins)).tolist()
        lengths = _lengths(prompt, PROMPT, count, random), _lengths(new, NEW, count, random)
        for turn, own, wanted in zip(turns, *lengths, strict=True):
            pieces = begins[turn] + random.choice(pool, own).tolist()
            yield Ask(" ".join(pieces) if isinstance(pool[0], str) else pieces, len(pieces), wanted)

    def times(self, rate: float | None, random: np.random.Generator) -> list[float]:
        """Return when each request of a measurement is sent, in seconds."""
        if rate is None:
            return [0.0] * self.requests
        gaps = random.gamma(self.burstiness, 1 / (rate * self.burstiness), self.requests)
        times: list[float] = np.cumsum(gaps).tolist()
        return times


def _lengths(given: int | None, mean: int, count: int, random: np.random.Generator) -> list[int]:
    if given is not None:
        return [given] * count
    drawn = random.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, count)
    lengths: list[int] = np.clip(drawn, FEWEST, MOST).astype(int).tolist()
    return lengths


def traffic_of(
    requests: int,
    concurrency: Sequence[int] | None,
    prompts: Sequence[int] | None,
    news: Sequence[int] | None,
    load: str = "random",
    rate: Sequence[float] | None = None,
    goodput: Sequence[str] = (),
    **others: Any,
) -> Traffic:
    """Return the traffic that options ask for; None and those left out are not given.

    Raises ConfigError if they do not go together.
    """
    if load not in KINDS:
        raise ConfigError(f"--load must be one of {', '.join(KINDS)}, got {load!r}")
    if load != "shared" and (idle := others.keys() & {"prefixes", "prefix"}):
        raise ConfigError(f"--{min(idle)} needs --load shared")
    if load == "sharegpt" and (prompts or news):
        raise ConfigError("--load sharegpt draws all lengths: leave out --prompt and --new")
    if rate is None and "burstiness" in others:
        raise ConfigError("--burstiness needs --rate")
    if rate and concurrency and len(concurrency) > 1:
        raise ConfigError(f"--rate takes one --concurrency, the most requests at once, got {len(concurrency)}")
    if load != "sharegpt":
        others |= dict(prompts=prompts or PROMPTS, news=news or NEWS)
    if rate:
        others |= dict(rates=rate)
    if concurrency or not rate:
        others |= dict(most=at_once(requests, concurrency))
    return Traffic(requests, load, limits=_limits(goodput), **others)


def _limits(goodput: Sequence[str]) -> dict[str, float]:
    limits: dict[str, float] = {}
    for given in goodput:
        name, _, most = given.partition(":")
        try:
            limit = float(most)
        except ValueError:
            limit = 0
        if name not in LIMITED or name in limits or not 0 < limit < float("inf"):
            raise ConfigError(f"--goodput must be ttft:MS, tpot:MS or e2el:MS, once each, got {given!r}")
        limits[name] = limit
    return limits

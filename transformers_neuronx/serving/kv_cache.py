"""What sequences have of the cache: tables of pages, and places of states. Plain data; the arrays are elsewhere.

Layers whose attention has the same window share tables. Each window has a pool of pages; a sequence has a table for
each pool, with a page for every so many positions, and NO_PAGE where pages behind the window were given back. States
have no pages: a sequence has a place for them, or two if draft tokens may have to be forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from transformers_neuronx.serving.pages import NO_PAGE, Pages, digests
from transformers_neuronx.serving.request import Request

Copy = tuple[tuple[int, int], ...]  # from and to, for each pool


class Found(NamedTuple):
    """What there is of a prompt: how many full pages, the tables with those, the number of positions with a part of one
    more, and the pages that have this part, one of each pool; none if there is none.
    """

    full: int
    tables: list[list[int]]
    positions: int
    copied: tuple[int, ...] = ()


class KVCache:
    """Pools of pages of one size, and places for the states of `rows` sequences, `places` for each.

    Sequences of models with states share no pages, as states of the middle of a prompt are not kept.
    """

    def __init__(self, pools: Sequence[Pages], rows: int = 0, places: int = 0) -> None:
        self.pools = tuple(pools)
        self._windowed = [number for number, pool in enumerate(pools) if pool.window is not None]
        self.size = max((pool.size for pool in pools), default=1)
        self.places = places
        self.free_places = list(range(rows * places, 0, -1))  # 0 is no one's

    @property
    def unused(self) -> bool:
        """Whether no sequence has any of it."""
        return all(pool.free == pool.count for pool in self.pools)

    def longest(self, tokens: int) -> float:
        """Return the most positions of a sequence, if a step has up to so many tokens of it."""
        return min((pool.longest(tokens) for pool in self.pools), default=math.inf)

    def name(self, request: Request) -> None:
        """Give a request the names of the full pages of its prompt, by which others find them."""
        tokens = request.tokens
        request.digests = digests(tokens, self.size, request.salt, request.contents(0, len(tokens)))

    def found(self, request: Request) -> Found:
        """Return what there is of a prompt. At least its last token is computed again, as the next one is sampled from
        its logits; and all of it, if something of each of its tokens is kept.
        """
        size, last = self.size, request.prompt_length - 1
        if request.given:
            return Found(len(request.given.tables[0]), request.given.tables, request.computed)
        if self.places or request.whole:
            return Found(0, [[] for _ in self.pools], 0)
        names = request.digests[: last // size]
        full = next(count for count in range(self._most(names), -1, -1) if self._have(names[:count]))
        rest = request.held(full * size, min((full + 1) * size, last))
        copied, alike = self._most_alike(request.before(full), rest)
        copied, alike = (copied, alike) if alike > size // 8 else ((), 0)
        positions, tables = full * size + alike, []
        for pool in self.pools:
            first = pool.first(positions)
            tables.append([NO_PAGE] * first + [pool.page_of(name) for name in names[first:full]])
        return Found(full, tables, positions, copied)

    def _most(self, names: Sequence[bytes]) -> int:
        """Return the most pages that there can be: those that are in all pools without a window."""
        return min((pool.known(names) for pool in self.pools if pool.window is None), default=len(names))

    def _have(self, names: Sequence[bytes]) -> bool:
        """Whether all pools have the pages that the token after them reads."""
        end = len(names) * self.size
        return all(all(map(pool.page_of, names[pool.first(end) :])) for pool in self.pools if pool.window)

    def _most_alike(self, before: bytes, tokens: Sequence[int | bytes]) -> tuple[tuple[int, ...], int]:
        """Return the pages that begin with most of `tokens`, one of each pool, and how many these are."""
        first, *others = self.pools
        name, alike = first.most_alike(before, tokens)
        pages = tuple(pool.page_of(name) for pool in (first, *others))
        return (pages, alike) if all(pages) else ((), 0)

    def fits(self, found: Found, positions: int, spare: int) -> bool:
        """Whether there are pages for a sequence that starts with `found`, and so many more for others."""
        return all(
            pool.needed(positions) - found.full + pool.unused(table) <= pool.free - spare
            for pool, table in zip(self.pools, found.tables, strict=True)
        )

    def start(self, request: Request, found: Found) -> None:
        """Let a request have what was found."""
        for pool, table in zip(self.pools, found.tables, strict=True):
            pool.take(table)
        request.tables, request.published = [list(table) for table in found.tables], found.full
        given = request.given
        request.places = given.places if given else [self.free_places.pop() for _ in range(self.places)]

    def is_whole(self, request: Request) -> bool:
        """Whether a request has pages for all positions that it can need."""
        return all(len(table) * self.size >= request.longest for table in request.tables)

    def room(self, request: Request) -> float:
        """Return the number of positions that there are pages for, with the free ones."""
        held = zip(self.pools, request.tables, strict=True)
        return min(((len(table) + pool.free) * self.size for pool, table in held), default=math.inf)

    def grow(self, request: Request, positions: int) -> bool:
        """Give a request pages for this many positions, or nothing if there are too few."""
        if all(len(table) * self.size >= positions for table in request.tables):
            return True
        if positions > self.room(request):
            return False
        for pool, table in zip(self.pools, request.tables, strict=True):
            table += pool.allocate(max(pool.needed(positions) - len(table), 0))
        return True

    def leave_behind(self, request: Request, position: int) -> None:
        """Take the pages back that no token from this position on reads."""
        for number in self._windowed:
            pool, table = self.pools[number], request.tables[number]
            first = end = pool.first(position)
            while first and table[first - 1] != NO_PAGE:
                first -= 1
            pool.release(table[first:end])
            table[first:end] = [NO_PAGE] * (end - first)

    def release(self, request: Request) -> None:
        """Take all back that a request has."""
        for pool, table in zip(self.pools, request.tables, strict=True):
            pool.release(table)
        if not request.given:
            self.free_places += request.places
        request.tables, request.places, request.published = [], [], 0

    def publish(self, request: Request) -> None:
        """Let others find the pages that are full of computed tokens of the prompt."""
        full = min(request.computed, request.prompt_length) // self.size
        for place in range(request.published, full):
            held = request.held(place * self.size, (place + 1) * self.size)
            for pool, table in zip(self.pools, request.tables, strict=True):
                pool.publish(table[place], request.digests[place], request.before(place), held)
        request.published = max(request.published, full)

    def forget(self) -> None:
        """Forget what pages hold, so that nobody finds them."""
        for pool in self.pools:
            pool.forget()

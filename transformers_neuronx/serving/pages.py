"""Pages of a cache: who has which, and which are known to hold the beginning of a prompt.

A page holds keys and values of a fixed number of positions. It is free, or one or several sequences have it. A full
page of prompt tokens can be published under a digest of these tokens and all before them. It then never changes, and
other sequences that begin alike can take it, even while it is free, until it is given away for something else. A
sequence that is alike for a part of the page can copy it.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile
from types import MappingProxyType

import numpy as np

NO_PAGE = 0  # never given to anyone: it stands where a sequence has no page
PAGE = 64  # positions of a page of an engine
COMPARED = 16  # pages with the same tokens before, of which the one most like a prompt is copied


def digests(
    tokens: Sequence[int], page: int, salt: bytes = b"", contents: Mapping[int, bytes] = MappingProxyType({})
) -> list[bytes]:  # fmt: skip
    """Return a digest for each full page of `tokens`; it depends on all tokens up to its end, on the salt, and on the
    `contents` of those that are more than their ids, by position.
    """
    chain, found = hashlib.sha256(salt).digest(), []
    ids = np.asarray(tokens, "<i4")
    for end in range(page, len(ids) + 1, page):
        more = b"".join(contents[place] for place in range(end - page, end) if place in contents)
        chain = hashlib.sha256(chain + ids[end - page : end].tobytes() + more).digest()
        found.append(chain)
    return found


class Pages:
    """`count` pages of `size` positions each, without the reserved one. Tokens read the last `window` positions."""

    def __init__(self, count: int, size: int, window: int | None = None) -> None:
        self.count, self.size, self.window = count, size, window
        self._holders = [0] * (count + 1)  # sequences that have each page
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count + 1))  # the next to give away first
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        # Of a published page: what is before, and its tokens.
        self._held: dict[int, tuple[bytes, tuple[int | bytes, ...]]] = {}
        self._after: dict[bytes, dict[int, None]] = {}  # published pages by what is before, the latest last

    @property
    def free(self) -> int:
        """Number of pages that no sequence has."""
        return len(self._free)

    @property
    def positions(self) -> int:
        return self.count * self.size

    def needed(self, positions: int) -> int:
        """Return the number of pages for this many positions."""
        return -(-positions // self.size)

    def longest(self, tokens: int) -> float:
        """Return the most positions of a sequence, with up to `tokens` in a step: any number, if its window fits."""
        if self.window is None:
            return self.positions
        read = self.window + tokens - 1  # they may begin and end inside a page
        return math.inf if self.needed(read - 1) + 1 <= self.count else self.positions

    def first(self, position: int) -> int:
        """Return the number of the first page that a token at this position reads."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // self.size

    def allocate(self, count: int) -> list[int]:
        """Give away free pages, those first that have been free for the longest time. What they held is forgotten."""
        assert count <= self.free
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
            if digest := self._digest_of.pop(page, None):
                del self._page_of[digest]
                before, _ = self._held.pop(page)
                del self._after[before][page]
                if not self._after[before]:
                    del self._after[before]
        return pages

    def page_of(self, digest: bytes) -> int:
        """Return the page published under this digest, or NO_PAGE."""
        return self._page_of.get(digest, NO_PAGE)

    def known(self, digests: Sequence[bytes]) -> int:
        """Return how many of these digests are known, up to the first that is not."""
        return next((place for place, digest in enumerate(digests) if digest not in self._page_of), len(digests))

    def unused(self, pages: Iterable[int]) -> int:
        """Return how many of these pages no sequence has: taking them leaves fewer free ones."""
        return sum(page in self._free for page in pages)

    def is_shared(self, page: int) -> bool:
        """Whether several sequences have the page."""
        return self._holders[page] > 1

    def take(self, pages: Iterable[int]) -> None:
        """Let one more sequence have each of these pages."""
        for page in filter(None, pages):
            self._free.pop(page, None)
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Let one sequence fewer have each of these pages. The last page is given away before the first."""
        for page in filter(None, reversed(pages)):
            assert self._holders[page] > 0, f"page {page} is free already"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free[page] = None
                if page not in self._digest_of:
                    self._free.move_to_end(page, last=False)  # nobody will ask for it

    def forget(self) -> None:
        """Forget what pages hold, so that nobody finds them."""
        for known in (self._page_of, self._digest_of, self._held, self._after):
            known.clear()

    def publish(self, page: int, digest: bytes, before: bytes, tokens: Sequence[int | bytes]) -> None:
        """Say what a full page holds: the digest, that of the page before, and its tokens. It never changes again."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest], self._digest_of[page] = page, digest
            self._held[page] = before, tuple(tokens)
            self._after.setdefault(before, {})[page] = None

    def most_alike(self, before: bytes, tokens: Sequence[int | bytes]) -> tuple[bytes, int]:
        """Return the digest of the published page that begins with most of `tokens`, after what `before` stands for,
        and how many these are. Only the COMPARED latest are looked at.
        """
        best = b"", 0
        for page in islice(reversed(self._after.get(before, {})), COMPARED):
            pairs = zip(tokens, self._held[page][1], strict=False)
            alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            best = max(best, (self._digest_of[page], alike), key=lambda each: each[1])
        return best

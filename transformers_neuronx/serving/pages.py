"""Pages of a cache: who has which, and which are known to hold the beginning of a prompt.

A page holds keys and values of a fixed number of positions. It is free, or one or several sequences have it. A full
page of prompt tokens can be published under a digest of these tokens and all before them. It then never changes, and
other sequences that begin alike can take it, even while it is free, until it is given away for something else.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

NO_PAGE = 0  # never given to anyone: it stands where a sequence has no page


def digests(tokens: Sequence[int], page: int, salt: bytes = b"") -> list[bytes]:
    """Return a digest for each full page of `tokens`; it depends on all tokens up to its end, and on the salt."""
    chain, found = hashlib.sha256(salt).digest(), []
    ids = np.asarray(tokens, "<i4")
    for end in range(page, len(ids) + 1, page):
        chain = hashlib.sha256(chain + ids[end - page : end].tobytes()).digest()
        found.append(chain)
    return found


class Pages:
    """`count` pages of `size` positions each, without the reserved one."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._holders = [0] * (count + 1)  # sequences that have each page
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count + 1))  # the next to give away first
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Number of pages that no sequence has."""
        return len(self._free)

    def needed(self, positions: int) -> int:
        """Return the number of pages for this many positions."""
        return -(-positions // self.size)

    def allocate(self, count: int) -> list[int]:
        """Give away free pages, those first that have been free for the longest time. What they held is forgotten."""
        assert count <= self.free
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
            if digest := self._digest_of.pop(page, None):
                del self._page_of[digest]
        return pages

    def matching(self, wanted: Iterable[bytes]) -> list[int]:
        """Return the pages published under these digests, up to the first that is unknown."""
        found = []
        for digest in wanted:
            if (page := self._page_of.get(digest)) is None:
                break
            found.append(page)
        return found

    def unused(self, pages: Iterable[int]) -> int:
        """Return how many of these pages no sequence has: taking them leaves fewer free ones."""
        return sum(page in self._free for page in pages)

    def take(self, pages: Iterable[int]) -> None:
        """Let one more sequence have each of these pages."""
        for page in pages:
            self._free.pop(page, None)
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Let one sequence fewer have each of these pages. The last page is given away before the first."""
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} is free already"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free[page] = None
                if page not in self._digest_of:
                    self._free.move_to_end(page, last=False)  # nobody will ask for it

    def forget(self) -> None:
        """Forget what pages hold, so that nobody finds them."""
        self._page_of.clear()
        self._digest_of.clear()

    def publish(self, page: int, digest: bytes) -> None:
        """Say what a full page holds. It must not be written any more."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest], self._digest_of[page] = page, digest

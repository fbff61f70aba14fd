"""The responses of /v1/responses that clients may ask for again, or continue: in memory, for as long as there is room.

The least recently used go first. A response belongs to the API key of its request; with another there is no such one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

MAX_RESPONSES = 1000
MAX_BYTES = 64 * 2**20  # of all together


class StoredResponse(NamedTuple):
    """A response and the items of the conversation that it answers, as JSON."""

    response: bytes
    items: bytes

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.response) + len(self.items)


class ResponseStore:
    """Responses by their ids, bounded by their number and their bytes. It belongs to one event loop."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self.max_responses, self.max_bytes = max_responses, max_bytes
        self.n_bytes = 0
        self._stored: OrderedDict[tuple[int | None, str], StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, key: int | None, id: str, stored: StoredResponse) -> None:
        """Keep a response of this API key (its number), and forget others where there is no room."""
        self.delete(key, id)
        self._stored[key, id] = stored
        self.n_bytes += stored.size
        while len(self._stored) > self.max_responses or self.n_bytes > self.max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self.n_bytes -= oldest.size

    def get(self, key: int | None, id: str) -> StoredResponse | None:
        """The response with this id, None if there is none (any more) for this key."""
        if (key, id) not in self._stored:
            return None
        self._stored.move_to_end((key, id))
        return self._stored[key, id]

    def delete(self, key: int | None, id: str) -> bool:
        """Forget a response; whether there was one."""
        found = self._stored.pop((key, id), None)
        self.n_bytes -= found.size if found else 0
        return found is not None

"""Tickets: batches described by arrays, for graphs that run in another process (ps workers).

`base.py` has the protocol `TicketSource`. `disk.py` makes tickets that name pieces of files,
`cached.py` tickets that name rows of examples cached in the worker. Read `base.py` first.
"""

from data.reader import Reader
from data.tickets.base import PackedTickets, TicketSource, pack_tickets
from data.tickets.cached import CachedTickets
from data.tickets.disk import DiskTickets

__all__ = ["DiskTickets", "PackedTickets", "TicketSource", "pack_tickets", "ticket_source"]


def ticket_source(reader: Reader) -> TicketSource:
    """Tickets for the training batches of `reader`."""
    return CachedTickets(reader) if reader.caches_examples else DiskTickets(reader)

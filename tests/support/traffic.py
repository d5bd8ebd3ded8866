"""Communication that is written down."""

from __future__ import annotations

from torch import Tensor

from megapar.core.comm.exchange import Exchange
from megapar.core.comm.in_flight import CommContext, InFlight
from megapar.core.device.base import Device


class RecordedTraffic(CommContext):
    """Writes down launches as NAME^ and waits as NAMEv, for each exchange that ``name_of`` has a name for.

    Attributes:
        events: What was written down.
    """

    def __init__(self, device: Device | None = None) -> None:
        super().__init__(device=device)
        self.events: list[str] = []
        self._names: dict[int, str] = {}

    def name_of(self, exchange: Exchange, x: Tensor) -> str | None:
        """Return the name of an exchange of ``x``: here the kind of collective."""
        return f"{exchange.kind} "

    def launch(self, exchange: Exchange, x: Tensor, side_stream: bool = False, owned: bool = False) -> InFlight:
        """See ``CommContext``."""
        flight = super().launch(exchange, x, side_stream, owned)
        if name := self.name_of(exchange, x):
            self._names[id(flight)] = name
            self.events.append(name + "^")
        return flight

    def wait(self, flight: InFlight, metered: bool = True) -> Tensor:
        """See ``CommContext``."""
        if id(flight) in self._names:
            self.events.append(self._names.pop(id(flight)) + "v")
        return super().wait(flight, metered)

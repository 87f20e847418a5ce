"""What is made where it is used, and neither copied nor pickled."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from warploom.errors import WrongCall


class Uncopied:
    """Base of what holds kernels, locks and memory of one device, at addresses that graphs know."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """What `copy` and `pickle` ask for.

        Raises:
            WrongCall: always, with what to keep instead.
        """
        name = type(self).__name__
        declaration = f"{name.removesuffix('Wrapper')}Declaration"
        raise WrongCall(
            function=f"copy or pickle of {name}",
            reason="it holds kernels, locks and memory of one device",
            hint=f" Keep a {declaration}, and make one of it by .on(device) where it is used.",
        )

"""FlashInfer's module of this name: bits of masks alone, as nothing is quantised here."""

from warploom.engines.flashinfer.masks import packbits, segment_packbits

__all__ = ["packbits", "segment_packbits"]

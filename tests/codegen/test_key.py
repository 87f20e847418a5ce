"""The cache key: equal exactly when the binary must be equal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warploom.codegen.cache.key import CacheKey, make_key
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.source import PLACE, KernelSource

SOURCE = KernelSource("portable_Causal_bf16", "int x;\n", "cuda")
TOOLS = {"nvrtc": "13.0", "flags": "--std=c++17"}


@dataclass(frozen=True)
class Host:
    compiler: str = "c++ 12"

    @property
    def name(self) -> str:
        return "cpu"

    def key_parts(self) -> dict[str, str]:
        return {"compiler": self.compiler}


@pytest.mark.parametrize(
    "other",
    [
        make_key(replace(SOURCE, text="int y;\n"), ARCHS["sm_80"], TOOLS),
        make_key(replace(SOURCE, entry="main"), ARCHS["sm_80"], TOOLS),
        make_key(replace(SOURCE, language="cpp"), ARCHS["sm_80"], TOOLS),
        make_key(SOURCE, ARCHS["sm_89"], TOOLS),
        make_key(SOURCE, ARCHS["sm_80"], {**TOOLS, "nvrtc": "13.1"}),
        make_key(SOURCE, ARCHS["sm_80"], {**TOOLS, "flags": "--std=c++20"}),
        make_key(SOURCE, ARCHS["sm_80"], {**TOOLS, "more": ""}),
        make_key(SOURCE, Host(), TOOLS),
        make_key(SOURCE, Host("c++ 13"), TOOLS),
    ],
)
def test_whatever_changes_the_binary_changes_the_key(other: CacheKey) -> None:
    assert other.digest != make_key(SOURCE, ARCHS["sm_80"], TOOLS).digest


def test_the_name_and_places_in_user_files_do_not_count() -> None:
    key = make_key(SOURCE, Host(), TOOLS)
    moved = replace(SOURCE, name="other", text=f"int x; {PLACE} model.py:12\n")
    assert make_key(moved, Host(), TOOLS).digest == key.digest


def test_the_digest_stays_what_it_is() -> None:
    """Entries written by this schema must be found again; raise SCHEMA when this must change."""
    digest = make_key(SOURCE, Host(), TOOLS).digest
    assert digest == "38dfd30e931cc4c798cc8480c12e3e7b3139a86d3fa1e0b643ef55d14e084d7a"


texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=6)
parts = st.dictionaries(texts, texts, max_size=4).map(lambda d: tuple(sorted(d.items())))


@given(parts, parts)
def test_different_parts_never_run_together(one: tuple, other: tuple) -> None:
    assert (CacheKey("k", one).digest == CacheKey("k", other).digest) == (one == other)


@given(st.text())
def test_any_name_gives_one_plain_folder(name: str) -> None:
    folder = CacheKey(name, ()).folder
    assert len(folder) <= 120 and not folder.startswith(".")
    assert all(letter.isascii() and (letter.isalnum() or letter in "_.-") for letter in folder)


def test_the_facts_hold_every_part_but_the_source_itself() -> None:
    facts = make_key(SOURCE, Host(), TOOLS).facts()
    assert facts["nvrtc"] == "13.0" and facts["compiler"] == "c++ 12"
    assert facts["source"].startswith("sha256:") and len(facts["source"]) == 71

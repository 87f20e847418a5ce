"""Precompiled headers: shared by processes, invisible in the result, never in the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from warploom.codegen.compilers import pch
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.compilers.nvrtc import Compiled, run_nvrtc
from warploom.codegen.compilers.pch import choose, leading_directives
from warploom.errors import CompileError

PREFIX = "// kernel {name}\n#include <cute/numeric/integral_constant.hpp>\n#include <cuda_bf16.h>\n"
BODY = """
namespace warploom {{ constexpr int kFactor = {factor}; }}
extern "C" __global__ void warploom_kernel(__nv_bfloat16* x) {{
  x[threadIdx.x] = __float2bfloat16(float(cute::Int<warploom::kFactor>::value));
}}
"""
SM_90 = ARCHS["sm_90a"]


def kernel(factor: int, prefix: str = PREFIX) -> str:
    return prefix.format(name=factor) + BODY.format(factor=factor)


def compiled(factor: int, prefix: str = PREFIX, use_pch: bool = True) -> Compiled:
    return run_nvrtc(kernel(factor, prefix), SM_90, "pch", use_pch=use_pch)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
class TestImages:
    def test_the_second_kernel_uses_the_image_of_the_first(self, cache: Path) -> None:
        first, second = compiled(1), compiled(2)
        assert (first.pch, second.pch) == ("created", "used")
        assert len(list((cache / "pch").iterdir())) == 1
        assert second.cubin == compiled(2, use_pch=False).cubin
        assert first.cubin == compiled(1, use_pch=False).cubin

    def test_another_process_uses_it_too(self, cache: Path) -> None:
        compiled(1)
        code = f"""
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.compilers.nvrtc import run_nvrtc
print(run_nvrtc({kernel(3)!r}, ARCHS["sm_90a"], "pch").pch)
"""
        runs = [
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
            for _ in range(2)
        ]
        assert [run.stdout.strip() for run in runs] == ["used", "used"], runs

    def test_processes_that_start_together_make_one_image(self, cache: Path) -> None:
        code = f"""
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.compilers.nvrtc import run_nvrtc
print(run_nvrtc({kernel(4)!r}, ARCHS["sm_90a"], "pch").pch)
"""
        command = [sys.executable, "-c", code]
        runs = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") for _ in range(3)
        ]
        results = sorted(run.communicate(timeout=120)[0].strip() for run in runs)
        assert results.count("created") == 1
        assert set(results) <= {"created", "used", "off"}
        assert [path.suffix for path in (cache / "pch").iterdir()] == [".pch"]

    def test_other_includes_get_another_image(self, cache: Path) -> None:
        compiled(1)
        assert compiled(1, PREFIX + "#include <cuda_fp16.h>\n").pch == "created"
        assert len(list((cache / "pch").glob("*.pch"))) == 2

    def test_a_damaged_image_costs_nothing_but_time(self, cache: Path) -> None:
        right = compiled(2, use_pch=False).cubin
        for content in (b"damaged", b"\0" * 4096, None):
            compiled(1)
            (image,) = (cache / "pch").iterdir()
            if content is None:
                os.truncate(image, image.stat().st_size // 2)
            else:
                image.write_bytes(content)
            assert compiled(2).cubin == right
        assert compiled(3).pch in ("created", "used")

    def test_an_error_in_the_source_is_reported_and_leaves_no_litter(self, cache: Path) -> None:
        with pytest.raises(CompileError, match="oops"):
            run_nvrtc(kernel(1) + "int a = oops;", SM_90, "pch")
        assert [path.suffix for path in (cache / "pch").iterdir()] in ([], [".pch"])
        assert compiled(1).pch in ("created", "used")

    def test_the_setting_turns_them_off(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WARPLOOM_PCH", "0")
        assert compiled(1).pch == "off"
        assert not (cache / "pch").exists()


def test_leading_directives_end_at_the_first_code() -> None:
    text = """// made by warploom
/* two
   lines */
#include   <a.cuh>  // why
  #  define X 1

namespace warploom { }
#include <b.cuh>
"""
    assert leading_directives(text) == ["#include <a.cuh>", "# define X 1"]
    assert leading_directives("#include <a>\n#pragma nv_hdrstop\n#include <b>\n") == [
        "#include <a>"
    ]


def test_the_choice_depends_on_prefix_and_parts_only(tmp_path: Path) -> None:
    def place(text: str, *parts: str) -> str:
        chosen = choose(tmp_path, text, parts)
        chosen.finish("off")
        return chosen.name

    plain = place("#include <a>\nint x;", "sm_80")
    assert plain == place("// other\n#include <a>\nint y;", "sm_80")
    assert plain != place("#include <a>\n#include <b>\nint x;", "sm_80")
    assert plain != place("#include <a>\nint x;", "sm_89")


def test_a_source_that_includes_nothing_needs_no_image(tmp_path: Path) -> None:
    assert choose(tmp_path / "pch", "#define X 1\nint x;", ()).mode == "off"
    assert not (tmp_path / "pch").exists()


def test_only_one_of_two_makes_the_image(tmp_path: Path) -> None:
    maker = choose(tmp_path, "#include <a>\n", ())
    assert maker.mode == "create"
    assert choose(tmp_path, "#include <a>\n", ()).mode == "off"
    maker.path.write_bytes(b"image")
    maker.finish("created")
    user = choose(tmp_path, "#include <a>\n", ())
    assert (user.mode, user.path.read_bytes()) == ("use", b"image")
    user.finish("rejected")
    assert choose(tmp_path, "#include <a>\n", ()).mode == "create"


def test_what_a_killed_process_was_making_is_made_again_at_once(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from warploom.codegen.compilers.pch import choose
maker = choose(Path({str(tmp_path)!r}), "#include <a>\\n", ())
maker.path.write_bytes(b"half an im")
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], cwd="/")
    assert len(list(tmp_path.iterdir())) == 2  # draft and lock
    other = choose(tmp_path, "#include <b>\n", ())  # sweeps
    assert len(list(tmp_path.iterdir())) == 2
    other.finish("off")
    maker = choose(tmp_path, "#include <a>\n", ())
    assert maker.mode == "create" and not maker.path.exists()
    maker.finish("off")
    assert list(tmp_path.iterdir()) == []


def test_an_image_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    maker = choose(tmp_path, "#include <a>\n", ())
    maker.path.write_bytes(b"image")
    maker.path.chmod(0o666)  # as a compiler with no umask makes it
    maker.finish("created")
    (image,) = tmp_path.iterdir()
    assert image.stat().st_mode & 0o777 == 0o644
    image.chmod(0o664)
    assert choose(tmp_path, "#include <a>\n", ()).mode == "off"
    image.chmod(0o644)
    tmp_path.chmod(0o777)
    assert choose(tmp_path, "#include <a>\n", ()).mode == "off"
    tmp_path.chmod(0o700)
    chosen = choose(tmp_path, "#include <a>\n", ())
    assert chosen.mode == "use"
    chosen.finish("used")


def test_where_images_do_not_work_none_is_tried_again(tmp_path: Path) -> None:
    choose(tmp_path, "#include <a>\n", ()).finish("failed")
    assert choose(tmp_path, "#include <a>\n", ()).mode == "off"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_small_or_unwritable_cache_has_no_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert choose(tmp_path / "file" / "pch", "#include <a>\n", ()).mode == "off"
    monkeypatch.setenv("WARPLOOM_CACHE_SIZE", "100")
    assert choose(tmp_path, "#include <a>\n", ()).mode == "off"


def test_old_images_make_room(tmp_path: Path) -> None:
    for i in range(pch._KEPT + 3):
        image = choose(tmp_path, f"#include <a{i}>\n", ())
        image.path.write_bytes(b"image")
        os.utime(image.path, (i + 1.0, i + 1.0))
        image.finish("created")
    left = sorted(path.stat().st_mtime for path in tmp_path.glob("*.pch"))
    assert left == [float(i) for i in range(4, pch._KEPT + 4)]

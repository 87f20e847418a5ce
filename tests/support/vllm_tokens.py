"""Tokens of vLLM in a process of its own: `python vllm_tokens.py JSON`, which prints them.

Speculation and several ranks want one: vLLM starts no second engine beside what they load.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SMALL = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "seed": 0}
MARK = "tokens: "


def main(job: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["model"], skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=True,
        **{"dtype": "float32", **SMALL, **job["options"]},
    )  # fmt: skip
    how = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, detokenize=False)
    asked: Any = [{"prompt_token_ids": one} for one in job["prompts"]]
    found = llm.generate(asked, how, use_tqdm=False)
    print(MARK + json.dumps([list(x.outputs[0].token_ids) for x in found]), flush=True)


def tokens(
    model: Path, prompts: list[list[int]], plugins: str, limit: float = 400, **options: Any
) -> list[list[int]]:
    """The answers, with or without the plug-in, which vLLM finds by its entry point."""
    job = json.dumps({"model": str(model), "prompts": prompts, "options": options})
    done = subprocess.run(
        [sys.executable, __file__, job], env=os.environ | {"VLLM_PLUGINS": plugins},
        capture_output=True, text=True, timeout=limit,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert done.returncode == 0 and found, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(found[0].removeprefix(MARK))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""The main path on real input, in two parts; `make demo` runs it."""

import time

import gemma2_paged
import huggingface
import torch
from rich import print
from rich.rule import Rule


def main() -> None:
    begin = time.perf_counter()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "this CPU"
    print(f"warploom on {where}")
    print(Rule("1  Gemma-2-like attention over a paged cache"))
    gemma2_paged.main()
    print(Rule("2  Sentences through a pretrained model"))
    huggingface.main()
    print(Rule(f"done in {time.perf_counter() - begin:.0f} s"))


if __name__ == "__main__":
    main()
